"""The recorded output of real agents within limits: of its size, of a file's size, of a disk."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from agents import AGENT, build_python_command, join_output_bytes, read_node_events, run_in_foreground, wait_for
from programs import run_headless
from zerotop.analysis.output.lines import BEGIN, OutputBuffer
from zerotop.recording.output.tail import read_output_tail
from zerotop.recording.output.transcript import Transcript
from zerotop.recording.reader import Recording

LIMIT = 1 << 17


@pytest.fixture(scope="module")
def long_recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that printed eight times what its recording may have."""
    folder = tmp_path_factory.mktemp("long")
    code = f"for i in range({LIMIT // 2}): print(f'line {{i:010}}')"
    info = {"zerotop": [1, 0], "clock": {"monotonic_ns": 0, "unix_ns": 0}, "boot": "", "max_bytes": int(LIMIT / 0.12)}
    (folder / "session.json").write_text(json.dumps(info))
    command = [*AGENT, "--foreground", str(folder), "--", *build_python_command(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert len(process.stdout.read()) == LIMIT // 2 * 16
        assert process.wait(20) == 0
    return folder


def test_a_long_output_keeps_its_begin_and_end(long_recording: Path) -> None:
    size = sum(path.stat().st_size for path in long_recording.glob("output-*"))
    assert LIMIT // 2 < size <= LIMIT
    lines = join_output_bytes(long_recording, "stdout").splitlines()
    numbers = [int(line.split()[1]) for line in lines]
    (cut,) = [place for place, (one, other) in enumerate(pairwise(numbers)) if other != one + 1]
    assert (numbers[0], numbers[-1]) == (0, LIMIT // 2 - 1)
    assert numbers[: cut + 1] == list(range(cut + 1))
    assert min(cut, len(numbers) - cut) * 16 > LIMIT // 5


def test_readers_say_how_much_is_left_out(long_recording: Path) -> None:
    recording = Recording.open(long_recording)
    buffer = OutputBuffer(recording)
    buffer.refresh_at(recording.last_written_ns)
    texts = [line.text for line in buffer.read_lines(BEGIN, 1 << 30)]
    (gap,) = [place for place, text in enumerate(texts) if not text.startswith("line ")]
    missing = (int(texts[gap + 1].split()[1]) - int(texts[gap - 1].split()[1]) - 1) * 16
    assert texts[gap] == f"[{missing:,} bytes of output left out here]"
    shown = Transcript(recording).read_tail(recording.last_written_ns, 1 << 30)
    assert list(shown) == texts
    tail = read_output_tail(recording.at(recording.last_written_ns), 20_000)
    assert tail == "".join(f"{text}\n" for text in texts).encode()[-20_000:]


def test_a_limit_of_file_sizes_is_the_jobs(tmp_path: Path) -> None:
    """Through a pipe any amount passes; the job's own files end as they do alone."""
    code = """
import os, signal, sys
for i in range(300): os.write(1, b"x" * 999 + b"\\n")
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
with open(sys.argv[1], "wb", buffering=0) as file:
    for i in range(300): file.write(bytes(1000))
"""
    command = ["bash", "-c", 'ulimit -f 64; exec "$@"', "bash", *AGENT, "--foreground", str(tmp_path / "recording"), "--"]
    (tmp_path / "recording").mkdir()
    done = subprocess.run(
        [*command, *build_python_command(code), str(tmp_path / "file")], capture_output=True, check=False, timeout=60
    )
    assert (done.returncode, len(done.stdout)) == (-25, 300_000)
    assert (tmp_path / "file").stat().st_size == 64 << 10
    assert join_output_bytes(tmp_path / "recording", "stdout") == done.stdout
    assert read_node_events(tmp_path / "recording", "job_ended")[0]["signal"] == "SIGXFSZ"


def run_with_limit(recording: Path, kind: int, value: int) -> subprocess.CompletedProcess[bytes]:
    """Run a job that prints a word and ends with 3."""
    code = f"""
import os, resource, sys
resource.setrlimit({int(kind)}, ({value}, {value}))
os.execv(sys.executable, [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", {str(recording)!r},
    "--", "sh", "-c", "echo word; exit 3"])
"""
    return subprocess.run(build_python_command(code), capture_output=True, check=False, timeout=60)


@pytest.mark.parametrize(("kind", "value"), [(resource.RLIMIT_AS, 60_000 << 10), (resource.RLIMIT_NOFILE, 24)])
def test_small_limits_are_enough_for_us(tmp_path: Path, kind: int, value: int) -> None:
    done = run_with_limit(tmp_path / "recording", kind, value)
    assert (done.returncode, done.stdout) == (3, b"word\n"), done.stderr


def test_with_too_few_descriptors_the_job_runs_alone_and_they_are_named(tmp_path: Path) -> None:
    done = run_with_limit(tmp_path / "recording", resource.RLIMIT_NOFILE, 8)
    assert (done.returncode, done.stdout) == (3, b"word\n")
    assert done.stderr == (
        b"zerotop: The job's output cannot be read: no file descriptor is free: zerotop needs about 20. Raise the limit"
        b" (ulimit -n). The job runs without zerotop, and nothing is recorded\n"
    )
    assert not (tmp_path / "recording").exists()


def test_a_recording_that_is_gone_is_not_said_to_be_there(tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    done = run_headless(recording, ["sh", "-c", f"until rm -rf {recording} 2>/dev/null; do :; done; echo word"])
    assert (done.returncode, done.stdout) == (0, b"word\n")
    assert done.stderr == f"zerotop: not recorded in {recording}: it was moved or removed while the job ran\n".encode()


def test_ranks_in_the_background_are_recorded_to_their_end(tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    rank = f"RANK=0 WORLD_SIZE=1 {sys.executable} -S -c 'import time; time.sleep(3); print(1)'"
    done = run_headless(recording, ["bash", "-c", f"{rank} & exit 6"])
    assert (done.returncode, done.stdout) == (6, b"1\n")
    assert done.stderr.startswith(b"zerotop: The job's first process has ended, but its training goes on.")
    assert [event["rank"] for event in read_node_events(recording, "rank_found", "rank_gone")] == [0, 0]


def test_a_daemon_holds_nothing_up_and_its_output_is_passed_on(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    recording = tmp_path / "recording"
    recording.mkdir()
    job = f"(until [ -e {flag} ]; do sleep 0.05; done; echo late) & echo early"
    with subprocess.Popen(
        [*AGENT, "--foreground", str(recording), "--", "sh", "-c", job], stdout=subprocess.PIPE
    ) as process:
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stdout.readline() == b"early\n"
        flag.touch()
        assert process.stdout.read() == b"late\n"
    wait_for(lambda: join_output_bytes(recording, "stdout") == b"early\nlate\n")


def test_a_recording_of_a_job_without_output_has_no_output_files(tmp_path: Path) -> None:
    run_in_foreground(tmp_path, "true")
    assert not list(tmp_path.glob("output-*"))
