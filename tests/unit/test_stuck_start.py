"""Jobs that stand still before their first step: whose stacks are read when, and what is said about them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from memory_recording import PlantedRecording, make_record
from small_recording import make_identity, make_span, second_to_unix_ns
from stuck_ranks_recording import SLEEPING, WAITING, Stand, make_facts
from zerotop.analysis.findings import Finding, Severity, detect_findings
from zerotop.analysis.hangs.reader import find_stillness
from zerotop.recording.reader import Recording
from zerotop_probe.inside import guard
from zerotop_probe.outside import procfs
from zerotop_probe.outside.sampling.stuck import start_watch
from zerotop_probe.outside.sampling.stuck.py_spy import read_dump
from zerotop_probe.outside.sampling.stuck.start_watch import FoundStart, StartWatch
from zerotop_probe.recording import events, tables

ARRIVED = Stand(WAITING, "poll")
ASLEEP = Stand(SLEEPING, "clock_nanosleep")
BUSY = Stand(SLEEPING, "clock_nanosleep", cores_used=1.0)
COMPUTING = Stand((("torch/autograd/graph.py", 979, "_engine_run_backward", False), ("train.py", 9, "<module>", True)))
DOWNLOADING = Stand((("urllib3/connection.py", 60, "read", False), ("train.py", 9, "<module>", True)))
IMPORTING = Stand((("<frozen importlib._bootstrap>", 60, "_find_and_load", False), ("train.py", 9, "<module>", True)))
BUILDING = Stand(
    (("torch/utils/cpp_extension.py", 60, "_run_ninja_build", False), ("train.py", 9, "<module>", True)), cores_used=1.0
)
LOCKED = Stand(
    (
        ("torch/utils/file_baton.py", 50, "FileBaton.wait", False),
        ("torch/utils/cpp_extension.py", 2400, "_jit_compile", False),
        ("train.py", 9, "<module>", True),
    )
)
COMING = Stand(
    (("torch/distributed/distributed_c10d.py", 1, "init_process_group", False), ("train.py", 9, "<module>", True))
)


def write_start(
    folder: Path,
    stands: Sequence[Stand],
    read_s: Sequence[float] = (15, 30),
    *,
    gone: tuple[float, int] | None = None,
    locked_s: float = 0.0,
    moved_s: float = 60.0,
    trained_s: float = 0.0,
) -> Recording:
    """Write ranks that were found at second 0 and whose stacks py-spy read; each had been idle all the time.

    From ``moved_s`` on they compute, and from ``trained_s`` on they train. ``gone``: when they end, and the exit code.
    """
    recording = PlantedRecording(folder)
    pids = [make_identity(rank).pid for rank in range(len(stands))]
    for rank, pid in enumerate(pids):
        recording.write_event(recording.node, 0, events.RankFound, rank=rank, pid=pid)
    for second in read_s:
        for rank, stand in enumerate(stands):
            facts = {name: value for name, value in make_facts(stand).items() if name in ("frames", "stacks", "collectives")}
            recording.write_event(
                recording.node, second, events.RankStacks, rank=rank, pid=pids[rank], idle_s=second, **facts
            )
    if locked_s:
        recording.write_event(recording.node, locked_s, events.BuildLocked, path="/cache/my ops/lock")
    if gone:
        for rank, pid in enumerate(pids):
            recording.write_event(recording.node, gone[0], events.RankGone, rank=rank, pid=pid)
        recording.write_event(recording.node, gone[0] + 1, events.JobEnded, exit_code=gone[1])
    rows = [
        make_record(tables.PROCESSES, second, pid=pids[rank], rank=rank, cores_used=used, waiting_cores=0.0)
        for second in range(60)
        for rank, stand in enumerate(stands)
        for used in [stand.cores_used if second < moved_s else 1.0]
    ]
    recording.write_records(tables.PROCESSES, recording.node, rows)
    for rank in range(len(stands)) if trained_s else ():
        spans = [make_span(trained_s + step, trained_s + step + 1, "step", step, tables.BOUNDARY) for step in range(9)]
        recording.write_records(tables.SPANS, make_identity(rank), spans, born=int(trained_s))
    return recording.open_recording()


def find_stuck(recording: Recording, second: float = 50) -> list[Finding]:
    found = detect_findings(recording, second_to_unix_ns(second))
    return [finding for finding in found if finding.name == "stuck_at_start"]


def test_the_rank_that_has_not_come_is_named(tmp_path: Path) -> None:
    recording = write_start(tmp_path, [ARRIVED, ASLEEP, ARRIVED])
    assert find_stuck(recording, 29) == []
    (stuck,) = find_stuck(recording)
    assert stuck.known_ns == second_to_unix_ns(30)
    said = "Stuck at the start for 30 s: rank 1 is in sleep at train.py:40 in build_batch"
    assert stuck.headline == said
    assert stuck.details == "Ranks 0 and 2 wait in all_reduce at train.py:90 in step. No rank has moved on since then."
    assert (stuck.ranks, stuck.fix, stuck.severity) == ((1,), "train.py:40", Severity.ERROR)


def test_a_standstill_that_has_ended_is_reported_in_the_past_with_its_length(tmp_path: Path) -> None:
    recording = write_start(tmp_path, [ARRIVED, ASLEEP, ARRIVED], moved_s=40, trained_s=45)
    (told,) = find_stuck(recording, 45)
    (over,) = find_stuck(recording)
    assert (told.severity, told.event) == (Severity.ERROR, over.event)
    assert over.headline == "No rank moved for 40 s at the start: rank 1 was at train.py:40 in build_batch"
    assert over.details == "Then they moved on: the first step began 5.00 s later."
    assert (over.severity, over.evidence["silent_s"], over.known_ns) == (Severity.INFO, 40.0, second_to_unix_ns(46))
    assert (over.advice, over.fix) == ("", "")


@pytest.mark.parametrize(
    ("moved_s", "exit_code", "known_s"), [(35, 1, 45), (60, 0, 56), (60, 1, None)], ids=["computes", "ends well", "fails"]
)
def test_ranks_that_move_on_without_a_step_are_not_stuck(
    tmp_path: Path, moved_s: float, exit_code: int, known_s: float | None
) -> None:
    recording = write_start(tmp_path, [ARRIVED, ASLEEP], moved_s=moved_s, gone=(55, exit_code))
    (told,), (last,) = find_stuck(recording, 44), find_stuck(recording, 58)
    assert (told.severity, told.event) == (Severity.ERROR, last.event)
    if known_s is None:
        assert last.severity is Severity.ERROR
    else:
        assert (last.severity, last.known_ns) == (Severity.INFO, second_to_unix_ns(known_s))
        assert last.details == "Then they moved on."


def test_a_rank_that_is_seen_elsewhere_has_moved_on_and_may_be_stuck_again(tmp_path: Path) -> None:
    planted, pid = PlantedRecording(tmp_path), make_identity(0).pid
    facts = {name: value for name, value in make_facts(COMING).items() if name in ("frames", "stacks")}
    for second, idle_s in ((40, 8.0), (52, 20.0)):
        planted.write_event(make_identity(-1, 999), second, events.RankStacks, rank=0, pid=pid, idle_s=idle_s, **facts)
    planted.open_recording()
    recording = write_start(tmp_path, [ASLEEP])
    (over,) = find_stuck(recording, 45)
    assert (over.severity, over.details) == (Severity.INFO, "Then they moved on.")
    again = find_stuck(recording, 55)
    assert [one.severity for one in again if one.event != over.event] == [Severity.ERROR]


def test_a_standstill_is_reported_again_while_it_lasts(tmp_path: Path) -> None:
    recording = write_start(tmp_path, [ARRIVED, ASLEEP, ARRIVED], [15, 30, 45])
    (first,), (second,) = find_stuck(recording, 44), find_stuck(recording)
    assert (first.evidence["silent_s"], second.evidence["silent_s"]) == (30.0, 45.0)
    assert first.event == second.event


def test_a_rank_that_is_not_there_at_all(tmp_path: Path) -> None:
    (stuck,) = find_stuck(write_start(tmp_path, [COMING, COMING]))
    assert stuck.headline.endswith("all ranks wait in init_process_group at train.py:9")
    assert "check that all nodes have started" in stuck.advice


def test_a_single_rank_that_waits_for_nobody_is_a_warning(tmp_path: Path) -> None:
    (stuck,) = find_stuck(write_start(tmp_path, [ASLEEP]))
    assert stuck.severity is Severity.WARNING


@pytest.mark.parametrize(
    "stands",
    [[ARRIVED, BUSY], [ARRIVED, DOWNLOADING], [ARRIVED, IMPORTING], [COMPUTING], [COMPUTING, COMPUTING]],
    ids=["one computes", "one downloads", "one imports", "a first backward", "the first backward of all"],
)
def test_a_slow_start_is_not_a_standstill(tmp_path: Path, stands: list[Stand]) -> None:
    assert find_stuck(write_start(tmp_path, stands)) == []


@pytest.mark.parametrize("stands", [[LOCKED, LOCKED], [ARRIVED, LOCKED]], ids=["all ranks", "the others wait for one"])
def test_the_lock_of_a_killed_build_is_named(tmp_path: Path, stands: list[Stand]) -> None:
    recording = write_start(tmp_path, stands, locked_s=20)
    assert find_stuck(recording, 29) == []
    (stuck,) = find_stuck(recording)
    assert stuck.headline == "Stuck at the start for 30 s: the ranks wait for a lock that no process holds"
    assert "holds /cache/my ops/lock" in stuck.details
    assert (stuck.fix, stuck.severity, stuck.known_ns) == ("rm '/cache/my ops/lock'", Severity.ERROR, second_to_unix_ns(30))


@pytest.mark.parametrize(
    ("stands", "locked_s"),
    [([BUILDING, LOCKED], 0.0), ([LOCKED, LOCKED], 0.0), ([LOCKED, LOCKED], 40.0), ([BUILDING, LOCKED], 20.0)],
    ids=["one builds", "a process holds the lock", "that is seen later", "one builds beside a killed build"],
)
def test_a_build_that_may_go_on_is_waited_for(tmp_path: Path, stands: list[Stand], locked_s: float) -> None:
    assert find_stuck(write_start(tmp_path, stands, locked_s=locked_s)) == []


def test_ranks_are_looked_at_twice(tmp_path: Path) -> None:
    assert find_stuck(write_start(tmp_path, [ARRIVED, ASLEEP], [15])) == []


def test_the_stacks_are_shown_until_something_moves_or_the_job_has_ended(tmp_path: Path) -> None:
    recording = write_start(tmp_path, [ARRIVED, ASLEEP])
    assert find_stillness(recording.at(second_to_unix_ns(20))) is None
    shown = find_stillness(recording.at(second_to_unix_ns(40)))
    assert shown is not None
    assert [group.ranks for group in shown.standstill.groups] == [(1,), (0,)]
    assert shown.since_ns == second_to_unix_ns(0)
    assert find_stillness(recording.at(second_to_unix_ns(200))) is None  # idle ranks would have been read again


def test_the_stacks_of_a_job_that_was_stopped_stay(tmp_path: Path) -> None:
    recording = write_start(tmp_path, [ARRIVED, ASLEEP], gone=(50, 1))
    assert find_stillness(recording.at(second_to_unix_ns(55))) is not None


@pytest.fixture
def idle_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has started and waits for input."""
    command = [sys.executable, "-S", "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while (stat := procfs.read_stat(process.pid)) is not None and stat.state != "S":  # it runs a little longer
            time.sleep(0.001)
        yield process
        process.kill()


def list_due_times(process: subprocess.Popen[bytes], *, is_new: bool) -> list[int]:
    """Return at which of 600 seconds a process was due."""
    watch, found = StartWatch(), FoundStart(0, process.pid, is_new)
    return [second for second in range(0, 600, 5) if list(watch.find_due([found], float(second)))]


def test_an_idle_rank_is_due_after_15_seconds_and_each_time_after_twice_as_long(
    idle_process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_watch, "_BUSY_S", ())
    assert list_due_times(idle_process, is_new=True) == [15, 30, 60, 120, 240, 480]


def test_an_idle_rank_of_a_job_that_was_attached_to_is_due_at_once(
    idle_process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_watch, "_ATTACHED_BUSY_S", ())
    assert list_due_times(idle_process, is_new=False) == [5, 10, 20, 40, 80, 160, 320]


@pytest.mark.parametrize(("is_new", "due"), [(True, [60, 120, 240]), (False, [5, 15, 60])])
def test_a_rank_that_computes_is_due_three_times(
    idle_process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, *, is_new: bool, due: list[int]
) -> None:
    monkeypatch.setattr(start_watch, "_BUSY_CORES", -1.0)  # whatever it uses is more
    assert list_due_times(idle_process, is_new=is_new) == due


def test_a_rank_that_gets_no_core_is_not_idle() -> None:
    """Two processes compute on one core, and one of them gets it only when nobody else wants it."""
    core = min(os.sched_getaffinity(0))
    setup = f"import os; os.sched_setaffinity(0, [{core}])"
    late = f"{setup}; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    compute = "print(flush=True)\nwhile True: pass"
    with ExitStack() as stack:
        processes = []
        for code in (late, setup):
            command = [sys.executable, "-S", "-c", f"{code}\n{compute}"]
            processes.append(stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE)))
            stack.callback(processes[-1].kill)
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        watch, found, begin_s = StartWatch(), FoundStart(0, processes[0].pid), time.monotonic()
        assert list(watch.find_due([found], begin_s)) == []
        time.sleep(2)
        checked_s = time.monotonic()
        assert list(watch.find_due([found], checked_s)) == []
        processes[1].kill()
        processes[0].send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, processes[0].pid, os.WSTOPPED)
        assert [due.idle_s for due in watch.find_due([found], checked_s + 1000)] == [pytest.approx(1000)]


def test_a_stack_has_neither_the_probe_nor_long_names_of_c() -> None:
    name = "std::enable_if<" + "a" * 90 + ">::call(int)"
    c_frame = {"name": name, "filename": "libx.so", "module": "/lib/libx.so", "line": 0}
    probe = {"name": "call_original", "filename": f"{Path(guard.__file__)}", "module": None, "line": 9}
    frame = {"name": "main", "filename": "/home/a/train.py", "module": None, "line": 3}
    fields = read_dump([{"os_thread_id": 7, "thread_name": None, "frames": [c_frame, c_frame, probe, frame]}], 7)
    assert fields is not None
    assert [one["function"] for one in fields["frames"]] == ["std::enable_if", "main"]


def test_a_rank_that_sleeps_between_its_steps_is_not_idle() -> None:
    """It uses hardly any processor time, and is in the same line at most looks."""
    command = [sys.executable, "-S", "-c", "import time\nprint(flush=True)\nwhile True: time.sleep(0.05)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        watch, found, begin_s = StartWatch(), FoundStart(0, process.pid, is_new=False), time.monotonic()
        due = []
        while time.monotonic() < begin_s + 4.5:
            due += list(watch.find_due([found], time.monotonic()))
            time.sleep(0.5)
        process.kill()
    assert due == []


@pytest.mark.parametrize("may_train", [True, False])
def test_a_new_rank_without_the_probe_is_not_idle_while_it_moves(*, may_train: bool) -> None:
    command = [sys.executable, "-S", "-c", "import time\nprint(flush=True)\nwhile True: time.sleep(0.02)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        watch, found = StartWatch(), FoundStart(0, process.pid, may_train=may_train)
        due = []
        for second in range(0, 60, 5):
            due += list(watch.find_due([found], float(second)))
            time.sleep(0.3)
        process.kill()
    assert bool(due) != may_train


def test_a_job_that_hung_when_it_was_attached_to(tmp_path: Path) -> None:
    planted = PlantedRecording(tmp_path)
    planted.write_event(make_identity(-1, 999), 0, events.Attached, pid=9)
    planted.open_recording()
    recording = write_start(tmp_path, [ARRIVED, ASLEEP], (4, 7))
    (finding,) = detect_findings(recording, second_to_unix_ns(20))
    assert (finding.name, finding.ranks, finding.known_ns) == ("stuck_at_start", (1,), second_to_unix_ns(7))
    assert finding.headline.startswith("No rank has moved for 7.00 s: rank 1 is in ")
    assert "Cores used: rank 0 " in finding.details


def write_attached(folder: Path, stands: Sequence[Stand], idle_s: Sequence[float]) -> list[Finding]:
    recording = PlantedRecording(folder)
    recording.write_event(make_identity(-1, 999), 0, events.Attached, pid=9)
    pids = [make_identity(rank).pid for rank in range(len(stands))]
    for rank, pid in enumerate(pids):
        recording.write_event(recording.node, 0, events.RankFound, rank=rank, pid=pid)
    for second in (5, 15, 24):
        for stand, idle, (rank, pid) in zip(stands, idle_s, enumerate(pids), strict=True):
            facts = {name: value for name, value in make_facts(stand).items() if name in ("frames", "stacks")}
            facts["idle_s"] = second * idle
            recording.write_event(recording.node, second, events.RankStacks, rank=rank, pid=pid, **facts)
    rows = [
        make_record(tables.PROCESSES, second, pid=pids[rank], rank=rank, cores_used=stand.cores_used, waiting_cores=0.0)
        for second in range(30)
        for rank, stand in enumerate(stands)
    ]
    recording.write_records(tables.PROCESSES, recording.node, rows)
    uses = [
        make_record(tables.GPU_PROCESSES, second, pid=pids[0], gpu=0, used_bytes=1, sm_percent=100.0) for second in range(30)
    ]
    recording.write_records(tables.GPU_PROCESSES, recording.node, uses)
    return list(detect_findings(recording.open_recording(), second_to_unix_ns(29)))


def test_ranks_that_wait_for_one_that_computes_without_end(tmp_path: Path) -> None:
    looping = Stand((("train.py", 40, "count", True), ("train.py", 90, "<module>", True)), cores_used=1.0)
    (finding,) = [one for one in write_attached(tmp_path, [ARRIVED, looping], [1.0, 0.0]) if one.name == "stuck_at_start"]
    assert finding.headline == "Others have waited 24 s for rank 1 at train.py:40"
    assert (finding.ranks, finding.fix, finding.severity) == ((1,), "train.py:40", Severity.WARNING)
    assert "Cores used: rank 0 0.0, rank 1 1.0. GPU used: rank 0 100 %." in finding.details


@pytest.mark.parametrize(
    ("stands", "idle_s"),
    [([ARRIVED, BUSY], [0.0, 0.0]), ([ARRIVED, DOWNLOADING], [1.0, 0.0]), ([COMPUTING, COMPUTING], [0.0, 0.0])],
    ids=["all move", "one downloads", "all compute"],
)
def test_a_job_that_is_well_when_it_is_attached_to(tmp_path: Path, stands: list[Stand], idle_s: list[float]) -> None:
    assert [one.name for one in write_attached(tmp_path, stands, idle_s) if one.name == "stuck_at_start"] == []
