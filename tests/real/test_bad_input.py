"""Whatever goes wrong, through the whole program: a sentence, the job's own exit code and bytes, no traceback of ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agents import build_python_command, join_output_bytes, read_node_events
from machine import make_read_only, run_in_cgroup, small_disk, small_group
from programs import ZEROTOP, make_environment, run_headless, run_zerotop
from rank_recordings import Rank

# Jobs


@pytest.mark.parametrize(
    ("code", "exit_code", "sentence"),
    [
        ("import no_such_module", 1, "The job failed with exit code 1."),
        ("import ctypes; ctypes.string_at(0)", -11, "The job was killed by signal 11 (SIGSEGV)."),
        ("import os; os.kill(os.getpid(), 9)", -9, "The job was killed by signal 9 (SIGKILL)."),
        ("import os; os.abort()", -6, "The job was killed by signal 6 (SIGABRT)."),
        ("print('I never import torch')", 0, None),
    ],
)
def test_a_job_that_dies_is_reported(tmp_path: Path, code: str, exit_code: int, sentence: str | None) -> None:
    recording = tmp_path / "recordings" / "mine"
    plain = subprocess.run(build_python_command(code), capture_output=True, check=False)
    done = run_headless(recording, build_python_command(code))
    assert (done.returncode, done.stdout) == (exit_code, plain.stdout)
    ours = [sentence] if sentence else []
    said = "".join(f"zerotop: {line}\n" for line in [*ours, f"recorded in {recording}"])
    assert done.stderr == plain.stderr + said.encode()


def test_the_kernels_oom_killer_is_named(tmp_path: Path) -> None:
    job = build_python_command("import time; time.sleep(0.5); held = bytearray(300 << 20)")
    with small_group(120 << 20) as group:
        command = run_in_cgroup(group, *ZEROTOP, "run", "--headless", "--recording", str(tmp_path / "s"), "--", *job)
        done = subprocess.run(command, check=False, timeout=60, capture_output=True)
    assert done.returncode == -9
    assert b"zerotop: The job was killed by signal 9 (SIGKILL); the kernel's OOM killer ended 1 process of" in done.stderr


# What the probe does in a rank, without DeepSpeed: an engine is made, two steps are trained, then it is killed.
RANK = """
import os, sys, time
from zerotop_probe.inside.hooks.hook_installer import PROBE
from zerotop_probe.recording.tables import BOUNDARY
PROBE.start_recording()
for step in range(2):
    for phase in ("forward", "backward", "step"):
        span = PROBE.recorder.begin_span(time.monotonic_ns(), phase, (0, step, 0))
        time.sleep(0.2)
        PROBE.recorder.end_span(span, time.monotonic_ns(), BOUNDARY if phase == "step" else 0)
PROBE.recorder.begin_span(time.monotonic_ns(), "forward", (0, 2, 0))
print("step 2 begins", flush=True)
os.kill(os.getpid(), 9)
"""
LAUNCHER = f"""
import os, subprocess, sys
sys.exit(subprocess.call([sys.executable, "-c", {RANK!r}], env={{**os.environ, "RANK": "0", "LOCAL_RANK": "0"}}) and 3)
"""


def test_a_killed_rank_leaves_all_it_did(tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    done = run_headless(recording, build_python_command(LAUNCHER))
    assert (done.returncode, done.stdout) == (3, b"step 2 begins\n")
    assert [event["rank"] for event in read_node_events(recording, "rank_found", "rank_gone")] == [0, 0]
    rank = Rank(recording, 0)
    assert (len(rank.spans), len(rank.begins)) == (6, 7)
    exported = run_zerotop(tmp_path, "export", str(recording))
    assert len(exported.stdout.splitlines()) == 3


@pytest.mark.parametrize(
    ("shell", "exit_code"),
    [
        ("trap '' CHLD; {} -c 'exit 5'", 5),  # the kernel would forget how the job ended
        ("{} -c 'exit 7' 2>/dev/full", 7),
        ("{} -c 'echo hi; exit 7' >/dev/full", 7),
        ("{} -c 'echo hi; exit 7' <&- >&- 2>&-", 7),
        ("{} -c 'exit 7' 2>&1 | true; exit ${{PIPESTATUS[0]}}", 7),
    ],
)
def test_the_exit_code_is_the_jobs_whatever_we_are_started_with(tmp_path: Path, shell: str, exit_code: int) -> None:
    command = shell.format(f"{' '.join(ZEROTOP)} run --headless --recording {tmp_path / 's'} -- sh")
    done = subprocess.run(["bash", "-c", command], check=False, capture_output=True, timeout=60)
    assert done.returncode == exit_code


def test_nothing_of_ours_comes_into_the_jobs_output_where_standard_error_is_closed(tmp_path: Path) -> None:
    command = f"{' '.join(ZEROTOP)} run --headless --recording {tmp_path / 's'} -- echo hi 2>&-"
    done = subprocess.run(["bash", "-c", command], check=True, stdout=subprocess.PIPE, timeout=60)
    assert done.stdout == join_output_bytes(tmp_path / "s", "stdout") == b"hi\n"


def test_output_that_could_not_be_passed_on_is_reported_and_recorded(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = run_headless(tmp_path / "s", ["echo", "hi"], stdout=full)
    assert done.returncode == 0
    assert (
        b"zerotop: The last part of the job's output could not be passed through: No space left on device.\n" in done.stderr
    )
    assert join_output_bytes(tmp_path / "s", "stdout") == b"hi\n"


# A user's own modules


def test_a_users_own_modules_are_the_users_own(tmp_path: Path) -> None:
    """With them on the path, beside the script, and in the working directory, where ``python -m zerotop`` looks too."""
    for name in ("sitecustomize", "probe", "tui", "recording", "train"):
        (tmp_path / f"{name}.py").write_text(f"import sys; sys.stderr.write('{name} of the user\\n')")
    (tmp_path / "train.py").write_text("import probe, tui, recording; print(probe.__file__, tui.__file__)")
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    chosen = {"env": make_environment(tmp_path, PYTHONPATH=os.pathsep.join(path)), "cwd": tmp_path}
    command = [sys.executable, "train.py"]
    plain = subprocess.run(command, check=True, capture_output=True, **chosen)  # type: ignore[call-overload]
    done = run_headless(tmp_path / "recordings" / "s", command, **chosen)
    assert done.stdout == plain.stdout
    # Our own Python has found it too.
    ours = f"zerotop: recorded in {tmp_path}/recordings/s\n"
    assert done.stderr == b"sitecustomize of the user\n" + plain.stderr + ours.encode()


# Disks


@pytest.mark.parametrize("chosen", [True, False])
def test_a_job_whose_recording_has_no_place_runs_unless_it_is_required(tmp_path: Path, chosen: bool) -> None:
    flag = tmp_path / "started"
    with small_disk(tmp_path / "disk", "1m") as disk:
        make_read_only(disk)
        folder = ["--recording", str(disk / "s")] if chosen else []
        job = ("--", "touch", str(flag))
        done = run_zerotop(disk, "run", "--headless", "--require-recording", *folder, *job)
        assert not flag.exists()
        ran = run_zerotop(disk, "run", "--headless", *folder, *job, env=make_environment(disk, TMPDIR=str(tmp_path)))
        where = disk / "s" if chosen else disk / "zerotop" / "sessions"
    why = f"Cannot record to {where}: Read-only file system"
    assert done.returncode == 1
    assert done.stderr.decode() == f"zerotop: Not started: {why}. Choose another folder with --recording DIR\n"
    assert ran.returncode == 0
    assert flag.exists()
    (recording,) = tmp_path.glob("zerotop-touch-*")
    assert ran.stderr.decode().splitlines() == [
        f"zerotop: {why}. Recording to {recording} instead",
        f"zerotop: recorded in {recording} instead: {why}",
    ]


@pytest.mark.parametrize("program", ["true", "./train"])
def test_a_folder_that_is_named_by_nothing_is_the_one_we_are_in(tmp_path: Path, program: str) -> None:
    """As from --recording "$UNSET". What lies there is not ours, also where the command turns out to be no program."""
    train = tmp_path / "work" / "train"
    train.parent.mkdir()
    train.write_text("no program")
    train.chmod(0o700)
    done = run_zerotop(tmp_path, "run", "--headless", "--recording", "", "--", program, cwd=train.parent)
    assert done.stderr.decode().startswith(
        f"zerotop: Cannot record to {train.parent}: {train.parent} exists and is not empty"
    )
    assert list(train.parent.iterdir()) == [train]


@pytest.mark.parametrize("chosen", [True, False])
def test_a_disk_that_is_full_from_the_start_keeps_no_half_recording(tmp_path: Path, chosen: bool) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        (disk / "zerotop" / "sessions").mkdir(parents=True)
        with (disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
            list(iter(lambda: filler.write(bytes(4096)), 0))
        folder = ["--recording", str(disk / "s")] if chosen else []
        done = run_zerotop(disk, "run", "--headless", "--require-recording", *folder, "--", "true")
        assert done.returncode == 1
        assert b": No space left on device. Choose another folder" in done.stderr
        assert [path for path in disk.rglob("*") if path.is_file()] == [disk / "filler"]
        assert not (disk / "s").exists()


def test_a_disk_that_runs_full_costs_the_recording_only_and_that_is_reported(tmp_path: Path) -> None:
    code = "import sys\nfor i in range(300): sys.stdout.write(f'{i:09999}\\n')\nsys.exit(5)"
    with small_disk(tmp_path / "disk", "1m") as disk:
        recording = disk / "zerotop" / "sessions" / "full"
        done = run_headless(recording, build_python_command(code))
        recorded = join_output_bytes(recording, "stdout")
        listed = run_zerotop(disk, "recordings").stdout.decode()
    assert done.returncode == 5
    assert done.stdout == b"".join(b"%09999d\n" % i for i in range(300))
    assert done.stdout.startswith(recorded)
    lost = f"{len(done.stdout) - len(recorded)} bytes of the job's output could not be written."
    match = re.search(rf"zerotop: (The recording is incomplete: (\d+ records? and )?{lost})\n", done.stderr.decode())
    assert match is not None
    assert "full  exit 5" in listed
    assert f"\n  {match[1]}\n" in listed


# Locales


@pytest.mark.parametrize(
    "locale",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii:strict"},
    ],
)
def test_a_locale_without_utf8(tmp_path: Path, locale: dict[str, str]) -> None:
    """Arguments, paths and output beyond ASCII, and bytes that are no text at all."""
    chosen = {"env": make_environment(tmp_path, **locale)}
    said = "Größe 日本 [red]\x1b[31m".encode() + b"\xff\n"
    words = [sys.executable, "-c", f"import os; os.write(1, {said!r})", "Größe", "日本", "two\nlines"]
    done = run_zerotop(tmp_path, "run", "--headless", "--", *words, **chosen)
    assert (done.returncode, done.stdout) == (0, said)
    strange = run_headless(tmp_path / "日本", ["true"], **chosen)
    assert strange.returncode == 0
    assert strange.stderr.isascii() or locale == {"LC_ALL": "C"}
    for arguments in (["recordings"], ["recordings", "--json"], ["doctor"], ["export", str(tmp_path / "日本")]):
        result = run_zerotop(tmp_path, *arguments, **chosen)
        assert (result.stderr, bool(result.stdout)) == (b"", True)
    assert run_zerotop(tmp_path, "recordings", **chosen).stdout.count(b"\n") == 1
    assert b"There is no recording" in run_zerotop(tmp_path, "replay", "Größe", **chosen).stderr
    assert run_zerotop(tmp_path, "run", "--", "日本", **chosen).returncode == 127
