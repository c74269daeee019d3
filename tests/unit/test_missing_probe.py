"""Why the probe was not loaded in a process, as seen from outside, and the sentences about it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agents import wait_for
from memory_recording import PlantedRecording
from small_recording import BEGIN_NS, S, make_identity
from zerotop.analysis.findings import Severity, detect_findings
from zerotop.analysis.processes import missing_probe as missing_analysis
from zerotop.analysis.processes.missing_probe import describe_missing_probes
from zerotop.analysis.views.notices import describe_training, describe_wait
from zerotop.recording.reader import Recording
from zerotop_probe.outside.job.job import build_environment
from zerotop_probe.outside.procfs import ProcessHandle, read_command_line, read_environment
from zerotop_probe.outside.sampling.ranks import missing_probe
from zerotop_probe.outside.sampling.ranks.missing_probe import Missing, ProbelessProcesses
from zerotop_probe.recording import events
from zerotop_probe.recording.writer import Identity

SESSION = "/recordings/one"
BOOTSTRAP = missing_probe._BOOTSTRAP
SLEEP = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def start_python() -> Iterator[Callable[..., ProcessHandle]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(command: Sequence[str], environment: Mapping[str, str]) -> ProcessHandle:
        started.append(subprocess.Popen(command, env=dict(environment), stdin=-1, stdout=-1))
        assert started[-1].stdout is not None
        started[-1].stdout.readline()
        process = ProcessHandle.from_pid(started[-1].pid)
        assert process is not None
        return process

    yield start
    for one in started:
        one.communicate()


def explain(process: ProcessHandle) -> Missing | None:
    arguments, environment = read_command_line(process.pid), read_environment(process.pid)
    return ProbelessProcesses(SESSION)._explain(process.pid, arguments, environment)


@pytest.mark.parametrize(
    ("options", "changes", "expected"),
    [
        ([], {}, None),
        (["-u"], {"PYTHONPATH": f"/elsewhere:{BOOTSTRAP}/:more"}, None),
        (["-I"], {}, Missing("option", "-I")),
        (["-uE"], {}, Missing("option", "-E")),
        ([], {"PYTHONPATH": "src"}, Missing("pythonpath", "command")),
        ([], {"PYTHONPATH": None}, Missing("unset", "command")),
        ([], {"PYTHONPATH": None, "PYTHONZEROTOP_SESSION": None}, Missing("environment", "command")),
        ([], {"PYTHONZEROTOP_SESSION": None}, Missing("session")),
        ([], {"PYTHONZEROTOP_SESSION": "/recordings/other"}, Missing("session")),
    ],
)
def test_the_reason_is_read_from_outside(
    start_python: Callable[..., ProcessHandle], options: list[str], changes: dict[str, str | None], expected: Missing | None
) -> None:
    environment = build_environment(SESSION, os.environ, unbuffered=False) | changes
    kept = {name: value for name, value in environment.items() if value is not None}
    assert explain(start_python([sys.executable, *options, "-c", SLEEP], kept)) == expected


def test_another_sitecustomize_comes_first(start_python: Callable[..., ProcessHandle], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").touch()
    environment = build_environment(SESSION, os.environ, unbuffered=False)
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    process = start_python([sys.executable, "-c", SLEEP], environment)
    assert explain(process) == Missing("shadowed", str(tmp_path / "sitecustomize.py"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start processes of others")
def test_a_process_of_another_user_cannot_write_to_the_recording(tmp_path: Path) -> None:
    environment = build_environment(str(tmp_path), os.environ, unbuffered=False)
    with subprocess.Popen(["sleep", "20"], env=environment, user=65534, cwd="/") as child:
        found = ProbelessProcesses(str(tmp_path))._explain(child.pid, ["python", "train.py"], environment)
        child.kill()
    assert found == Missing("user")


@pytest.mark.parametrize(
    ("command", "changer"),
    [
        (["bash", "-c", f"PYTHONPATH=src {sys.executable} -c '{SLEEP}'; true"], "script"),
        ([sys.executable, "-c", f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', '{SLEEP}'], env={{}})"],
         os.path.basename(sys.executable)),
    ],
)  # fmt: skip
def test_who_changed_the_environment(start_python: Callable[..., ProcessHandle], command: list[str], changer: str) -> None:
    parent = start_python(command, build_environment(SESSION, os.environ, unbuffered=False))
    (child,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    found = explain(ProcessHandle(int(child), 0))
    assert found is not None
    assert found.by == changer


TORCH = "import mmap, sys; file = open(sys.argv[1]); memory = mmap.mmap(file.fileno(), 0, prot=1); "
NAME = "import ctypes; ctypes.CDLL(None).prctl(15, b'pt_gloo_runloop', 0, 0, 0); "


def test_which_processes_are_ranks(
    start_python: Callable[..., ProcessHandle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sleeper is one after some seconds, one with a process group at once; a launcher or an importer is none."""
    library = tmp_path / "libtorch_cpu.so"
    library.write_bytes(b"x")
    monkeypatch.setattr(missing_probe, "_TRAINS_S", 1.0)
    monkeypatch.setattr(missing_probe, "_WAITING_S", 0.5)
    parent = (
        f"import subprocess; p = subprocess.Popen([sys.executable, '-c', CHILD, {str(library)!r}]); print(flush=True); "
        "sys.stdin.read()"
    )
    busy = (
        "import zlib\nprint(flush=True)\nwhile not __import__('select').select([0], [], [], 0)[0]: zlib.crc32(bytes(10**6))"
    )
    codes = {
        "sleeper": TORCH + SLEEP,
        "group": TORCH + NAME + SLEEP,
        "importer": TORCH + busy,
        "without torch": "pass; " + SLEEP,
        "launcher": TORCH + parent.replace("CHILD", repr(TORCH + NAME + "sys.stdin.read()")),
    }
    processes = {
        name: start_python([sys.executable, "-c", code, str(library)], {"PATH": os.environ["PATH"]})
        for name, code in codes.items()
    }
    pids = {process.pid: name for name, process in processes.items()}
    seen: dict[str, list[bool]] = {}
    tracked = ProbelessProcesses(SESSION)

    def look() -> bool:
        for process in processes.values():
            tracked.add_process(process, None, read_command_line(process.pid), {})
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                found = ProcessHandle.from_pid(int(child))
                if found is not None:
                    pids.setdefault(found.pid, f"child of {pids[process.pid]}")
                    tracked.add_process(found, None, read_command_line(found.pid), {})
        for one, is_rank in tracked.find_new(time.monotonic()):
            seen.setdefault(pids[one.process.pid], []).append(is_rank)
        time.sleep(0.1)
        return time.monotonic() > end_s

    end_s = time.monotonic() + 3
    wait_for(look)
    assert {name: ranks[-1] for name, ranks in seen.items()} == {
        "sleeper": True, "group": True, "importer": False, "launcher": False, "child of launcher": True,
    }  # fmt: skip


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_process_below_one_with_the_probe_counts_only_if_that_waits(
    start_python: Callable[..., ProcessHandle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_busy: bool
) -> None:
    library = tmp_path / "libtorch_cpu.so"
    library.write_bytes(b"x")
    monkeypatch.setattr(missing_probe, "_WAITING_S", 0.5)
    monkeypatch.setattr(ProbelessProcesses, "_cannot_write", lambda tracked, pid: False)
    wait = "while not select.select([0], [], [], 0)[0]: zlib.crc32(bytes(10**6))" if is_busy else "sys.stdin.read()"
    code = TORCH + (
        "import select, subprocess, zlib\n"
        f"child = subprocess.Popen([sys.executable, '-c', {TORCH + 'sys.stdin.read()'!r}, sys.argv[1]], env={{}})\n"
        f"print(flush=True)\n{wait}"
    )
    parent = start_python(
        [sys.executable, "-c", code, str(library)], build_environment(SESSION, os.environ, unbuffered=False)
    )
    (pid,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    child = ProcessHandle.from_pid(int(pid))
    assert child is not None
    tracked = ProbelessProcesses(SESSION)
    tracked.add_process(parent, None, read_command_line(parent.pid), read_environment(parent.pid))
    time.sleep(0.3)
    list(tracked.find_new(time.monotonic()))
    time.sleep(0.7)
    wait_for(lambda: missing_probe.has_imported_torch(child.pid))
    tracked.add_process(child, None, read_command_line(child.pid), {})
    assert [one.process for one, _ in tracked.find_new(time.monotonic())] == ([] if is_busy else [child])


@pytest.mark.parametrize("script", ["/venv/torch/_inductor/compile_worker/__main__.py", "/src/compile_worker/__main__.py"])
def test_a_compile_worker_of_pytorch_is_no_rank(script: str) -> None:
    assert missing_probe.is_compile_worker(["python", script, "--kind=fork"]) == ("/torch/" in script)


def write_missing(recording: PlantedRecording, at: float, pid: int, **facts: Any) -> None:
    usual = {"rank": None, "start": 1, "is_rank": True, "program": "python loop.py", "reason": "pythonpath", "by": "script"}
    recording.write_event(recording.node, at, events.ProbeMissing, pid=pid, **usual | facts)


def open_ended(recording: PlantedRecording, at: float) -> Recording:
    recording.write_event(recording.node, at, events.JobEnded, exit_code=0)
    return recording.open_recording()


def test_ranks_without_the_probe_are_a_finding_and_a_sentence(tmp_path: Path) -> None:
    planted = PlantedRecording(tmp_path)
    planted.write_event(planted.node, 0, events.JobStarted, pid=9)
    for rank in (0, 1):
        write_missing(planted, 2 + rank, 50 + rank, rank=rank)
    recording = open_ended(planted, 20)
    sentence = "The probe was not loaded in 2 ranks: their PYTHONPATH does not have zerotop's entry (the script sets it)."
    assert describe_missing_probes(recording.at(BEGIN_NS + 20 * S)) == [sentence]
    assert describe_wait(recording.at(BEGIN_NS + 10 * S)).startswith(f"{sentence} E, or zerotop attach 50 --enter, ")
    assert describe_training(recording.at(BEGIN_NS + 20 * S)) == []
    (early,), (late,) = (detect_findings(recording, BEGIN_NS + second * S) for second in (19, 20))
    for finding in (early, late):
        assert (finding.name, finding.ranks, finding.begin_ns) == ("probe_missing", (0, 1), BEGIN_NS + 2 * S)
        assert finding.headline == "The probe was not loaded in 2 ranks: PYTHONPATH lacks its entry"
    assert (early.known_ns, early.fix) == (BEGIN_NS + 7 * S, "zerotop attach 50 --enter")
    assert " E on the screen " in early.advice
    assert (late.advice, late.fix) == ('Keep what PYTHONPATH has, as in PYTHONPATH="src:$PYTHONPATH".', "")


@pytest.mark.parametrize("reason", missing_analysis._REASONS)
@pytest.mark.parametrize("count", [1, 1234])
def test_each_reason_is_a_short_headline_and_a_clause(reason: str, count: int) -> None:
    event = events.ProbeMissing({}, BEGIN_NS, Identity("node", -1, "node1", 9, 0, ""))
    for by in ("script", "/a/b/sitecustomize.py" if reason == "shadowed" else "-I" if reason == "option" else "sudo"):
        missing = missing_analysis.MissingProbe(reason, by, True, (event,) * count)
        assert len(missing.headline) <= 80
        assert "{" not in missing.headline + missing.sentence + missing.remedy


def test_a_short_process_is_no_rank_but_it_may_have_trained(tmp_path: Path) -> None:
    planted = PlantedRecording(tmp_path)
    planted.write_event(planted.node, 0, events.JobStarted, pid=9)
    write_missing(planted, 2, 50, is_rank=False, reason="environment", by="command")
    recording = open_ended(planted, 4)
    assert describe_missing_probes(recording.at(BEGIN_NS + 3 * S)) == []
    assert describe_missing_probes(recording.at(BEGIN_NS + 4 * S)) == [
        "The probe was not loaded in a process with PyTorch (python loop.py): its environment does not have zerotop's "
        "PYTHONPATH and variables (the command replaces it)."
    ]
    assert describe_training(recording.at(BEGIN_NS + 4 * S)) == []


def test_a_process_without_a_number_counts_only_while_no_rank_reports(tmp_path: Path) -> None:
    planted = PlantedRecording(tmp_path)
    planted.write_event(planted.node, 0, events.JobStarted, pid=9)
    write_missing(planted, 2, 50)
    write_missing(planted, 2.5, 51, rank=1, reason="option", by="-S")
    planted.write_event(make_identity(0, 52), 3, events.Hello)
    recording = open_ended(planted, 20)
    assert describe_missing_probes(recording.at(BEGIN_NS + 20 * S)) == [
        "The probe was not loaded in 1 rank: it runs python -S, which does not load site modules."
    ]


@pytest.mark.parametrize("is_over", [False, True])
def test_a_process_beside_one_that_reports_later_was_not_loaded_late(tmp_path: Path, *, is_over: bool) -> None:
    planted = PlantedRecording(tmp_path)
    planted.write_event(planted.node, 0, events.JobStarted, pid=9)
    write_missing(planted, 2, 50)
    planted.write_event(make_identity(0, 52), 12, events.Hello)
    recording = open_ended(planted, 20)
    (early,) = detect_findings(recording, BEGIN_NS + 11 * S)
    assert early.headline == "The probe was not loaded in 1 rank: PYTHONPATH lacks its entry"
    (late,) = detect_findings(recording, BEGIN_NS + (20 if is_over else 13) * S)
    assert (late.severity, late.event) == (Severity.INFO, early.event)
    assert late.headline == "A process with PyTorch runs without the probe: PYTHONPATH lacks its entry"


def test_a_rank_that_was_entered_later_has_the_probe(tmp_path: Path) -> None:
    planted = PlantedRecording(tmp_path)
    planted.write_event(planted.node, 0, events.JobStarted, pid=9)
    write_missing(planted, 2, 50)
    planted.write_event(make_identity(0, 50), 9, events.Hello)
    recording = open_ended(planted, 20)
    assert len(describe_missing_probes(recording.at(BEGIN_NS + 8 * S))) == 1
    assert describe_missing_probes(recording.at(BEGIN_NS + 20 * S)) == []
    (late,) = detect_findings(recording, BEGIN_NS + 20 * S)
    assert late.headline == "The probe was loaded late: PYTHONPATH lacks its entry"
    assert (late.details.endswith("Steps before it was loaded are not recorded."), late.fix) == (True, "")
