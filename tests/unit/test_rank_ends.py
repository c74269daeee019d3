"""How ranks ended: what launchers print, tracebacks, and which rank failed first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import recordings
from memory_recording import PlantedRecording, record_two_steps
from small_recording import BEGIN_NS, S, make_identity, make_record, make_span
from zerotop.analysis.failures.diagnosis import find_failure
from zerotop.analysis.failures.launcher_reports import LauncherReport, parse_reports
from zerotop.analysis.failures.rank_ends import find_ends
from zerotop.analysis.failures.tracebacks import Traceback, parse_tracebacks
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.analysis.reports.recording_summary import build_overview
from zerotop.recording.moments.process_exits import find_end_signal
from zerotop.recording.output.tail import PrintedLine
from zerotop_probe.outside import procfs
from zerotop_probe.recording import events, tables

# As torchrun of PyTorch 2.13 prints it.
TORCHRUN = """\
W1122 20:09:02 4430 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 4436 closing signal SIGTERM
E1122 20:09:02 4430 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 4437)\
 of binary: /usr/bin/python
Traceback (most recent call last):
  File "/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "/venv/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
======================================================
train.py FAILED
------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-22_20:09:02
  host      : localhost
  rank      : 4 (local_rank: 0)
  exitcode  : -15 (pid: 4436)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 4436
------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_20:09:02
  host      : localhost
  rank      : 5 (local_rank: 1)
  exitcode  : -9 (pid: 4437)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4437
======================================================
"""
DEEPSPEED = """\
[2026-11-22 20:10:43,936] [INFO] [launch.py:253:sigkill_handler] Killing subprocess 5205
[2026-11-22 20:10:43,960] [INFO] [launch.py:253:sigkill_handler] Killing subprocess 5206
[2026-11-22 20:10:43,960] [ERROR] [launch.py:259:sigkill_handler] ['/usr/bin/python', '-u', 'train.py', '--local_rank=1',\
 '--deepspeed'] exits with return code = -9
"""
SRUN = """\
srun: error: node3: task 12: Killed
srun: Terminating StepId=71.0
srun: error: node2: task 5: Segmentation fault (core dumped)
srun: error: node1: tasks 0-4: Terminated
srun: error: node2: task 6: Exited with exit code 7
"""
# As Ray 2.60 prints it: the log of a worker of TorchTrainer that failed, and an exception of an actor in the driver.
RAY_TRAIN = """\
(RayTrainWorker pid={pid}) Error in training function:
(RayTrainWorker pid={pid}) Traceback (most recent call last):
(RayTrainWorker pid={pid})   File "/home/me/train.py", line 16, in loop
(RayTrainWorker pid={pid})     raise RuntimeError("bad batch")
(RayTrainWorker pid={pid}) RuntimeError: bad batch
(TrainController pid=7) Traceback (most recent call last):
(TrainController pid=7)   File "/venv/lib/python3.11/site-packages/ray/_private/worker.py", line 3009, in get
(TrainController pid=7)     values, debugger_breakpoint = worker.get_objects(
(TrainController pid=7) ray.exceptions.GetTimeoutError: Get timed out: some object(s) not ready.
"""
RAY_ACTOR = """\
Traceback (most recent call last):
  File "/home/me/actors.py", line 17, in <module>
    ray.get([worker.train.remote() for worker in workers])
  File "/venv/lib/python3.11/site-packages/ray/_private/worker.py", line 1053, in get_objects
    raise value.as_instanceof_cause()
ray.exceptions.RayTaskError(RuntimeError): \x1b[36mray::Worker.train()\x1b[39m (pid={pid}, ip=192.0.2.2, actor_id=42)
  File "/home/me/train.py", line 16, in loop
    raise RuntimeError("bad batch")
RuntimeError: bad batch
"""
# Two ranks at once; the first has the error of a data loader's worker.
MIXED = """\
loading: 1
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "/home/me/run/train.py", line 88, in <module>
[rank0]:   File "/home/me/run/train.py", line 90, in <module>
[rank1]:     for batch in loader:
[rank1]:   File "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 701, in __next__
[rank0]:     dist.all_reduce(loss)
[rank1]: ValueError: Caught ValueError in DataLoader worker process 0.
[rank0]:   File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
[rank1]: Original Traceback (most recent call last):
[rank1]:   File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
[rank1]:   File "/home/me/run/data/rows.py", line 12, in __getitem__
[rank1]:     raise ValueError("row 7 is empty")
[rank1]: ValueError: row 7 is empty
[rank0]: RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44934.
"""


def make_lines(text: str, time_ns: int = 0) -> list[PrintedLine]:
    return [PrintedLine(time_ns, line) for line in text.splitlines()]


def test_torchruns_table_and_log() -> None:
    logged, fallen, first = parse_reports(make_lines(TORCHRUN))
    assert (logged.exit_code, logged.is_first, logged.local_rank, logged.pid) == (-9, True, 1, 4437)
    assert fallen == LauncherReport("torchrun", 0, -15, is_first=False, rank=4, local_rank=0, pid=4436)
    assert first == LauncherReport("torchrun", 0, -9, is_first=True, rank=5, local_rank=1, pid=4437)
    assert list(parse_tracebacks(make_lines(TORCHRUN))) == []


def test_deepspeeds_launcher_does_not_say_which_rank_ended_first() -> None:
    assert parse_reports(make_lines(DEEPSPEED)) == [LauncherReport("DeepSpeed's launcher", 0, -9, is_first=True)]


def test_sruns_tasks() -> None:
    reports = [(one.rank, one.exit_code, one.is_first) for one in parse_reports(make_lines(SRUN))]
    assert reports == [(12, -9, True), (5, -11, False), (6, 7, False)]


def test_tracebacks_of_two_ranks_at_once() -> None:
    outer, worker, waiting = parse_tracebacks(make_lines(MIXED))
    assert outer.place == "train.py:88"
    assert (worker.rank, worker.text, worker.place) == (1, "ValueError: row 7 is empty", "rows.py:12 in __getitem__")
    assert (waiting.rank, waiting.error, waiting.place) == (0, "RuntimeError", "train.py:90")
    assert [one.is_lost_peer for one in (outer, worker, waiting)] == [False, False, True]


@pytest.mark.parametrize(("prefix", "rank", "local_rank"), [("", None, None), ("[default3]:", None, 3), ("12: ", 12, None)])
def test_prefixes_of_launchers(prefix: str, rank: int | None, local_rank: int | None) -> None:
    text = "".join(f"{prefix}{line.removeprefix('[rank1]: ')}\n" for line in MIXED.splitlines() if "rank0" not in line)
    last: Traceback = list(parse_tracebacks(make_lines(text)))[-1]
    assert (last.rank, last.local_rank, last.text) == (rank, local_rank, "ValueError: row 7 is empty")


def _lose_two_ranks(folder: Path, output: str, exit_code: int = 1) -> PlantedRecording:
    """Rank 0 ends at second 31 with a goodbye, rank 1 at 31.2 without one; the launcher ends at 33."""
    recording = record_two_steps(folder)
    recording.write_records(tables.SPANS, make_identity(1), [make_span(29, 30, "step", 2, tables.BOUNDARY)], born=1)
    for rank in (0, 1):
        recording.write_event(make_identity(rank), 1.5, events.Hello, rank=rank, local_rank=rank)
    recording.write_event(make_identity(0), 31, events.Goodbye)
    for rank, second in ((0, 31.1), (1, 31.2)):
        recording.write_event(recording.node, second, events.RankGone, rank=rank, pid=make_identity(rank).pid)
    recording.write_output(32, output)
    recording.write_event(recording.node, 33, events.JobEnded, exit_code=exit_code, signal=None, text="The job failed.")
    return recording


def _find_dead(recording: PlantedRecording, second: float) -> list[Finding]:
    findings = detect_findings(recording.open_recording(), BEGIN_NS + int(second * S))
    return [finding for finding in findings if finding.name == "dead_rank"]


def test_the_launchers_word_decides_over_the_order_of_ends(tmp_path: Path) -> None:
    recording = _lose_two_ranks(tmp_path, DEEPSPEED)
    assert _find_dead(recording, 31.9) == []
    (dead,) = _find_dead(recording, 40)
    assert dead.headline == "Rank 1 was killed by signal 9 (SIGKILL) after 3 steps"
    assert "as DeepSpeed's launcher printed" in dead.details
    assert BEGIN_NS + 32 * S <= dead.known_ns <= BEGIN_NS + int(32.1 * S)


def _end_ray_workers(folder: Path, **end: Any) -> PlantedRecording:
    """Two workers of Ray are gone at second 31; the driver ends at 50."""
    recording = record_two_steps(folder)
    recording.write_records(tables.SPANS, make_identity(1), [make_span(29, 30, "step", 2, tables.BOUNDARY)], born=1)
    worker = "/opt/ray/_private/workers/default_worker.py"
    for rank in (0, 1):
        facts = {"rank": rank, "local_rank": rank, "arguments": [worker, "--raylet-name=r"]}
        recording.write_event(make_identity(rank), 1.5, events.Hello, **facts)
        recording.write_event(recording.node, 31, events.RankGone, rank=rank, pid=make_identity(rank).pid)
    recording.write_event(recording.node, 50, events.JobEnded, **{"exit_code": 0, "signal": None, **end})
    return recording


def test_workers_that_ray_ends_have_not_died(tmp_path: Path) -> None:
    """Their processes end without a goodbye, at times long before the driver."""
    recording = _end_ray_workers(tmp_path)
    assert (_find_dead(recording, 45), _find_dead(recording, 60)) == ([], [])


@pytest.mark.parametrize("end", [{"exit_code": 1}, {"exit_code": None, "signal": "SIGKILL"}, {"oom_kills": 1}])
def test_a_driver_that_fails_says_that_workers_of_ray_died(tmp_path: Path, end: dict[str, Any]) -> None:
    recording = _end_ray_workers(tmp_path, **end)
    assert _find_dead(recording, 45) == []
    (dead,) = _find_dead(recording, 60)
    assert dead.known_ns == BEGIN_NS + 50 * S


@pytest.mark.parametrize("output", [RAY_TRAIN, RAY_ACTOR], ids=["train", "actor"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_worker_of_ray_that_raised_is_named(tmp_path: Path, output: str, rank: int) -> None:
    """Ray ends all of its workers then: none of them leaves a word of its own."""
    recording = _end_ray_workers(tmp_path, exit_code=1)
    recording.write_output(33, output.format(pid=make_identity(rank).pid))
    (dead,) = _find_dead(recording, 60)
    assert dead.headline == f"Rank {rank} ended with RuntimeError at train.py:16 in loop"
    assert dead.ranks == (rank,)


def test_a_worker_of_ray_that_lost_another_one_did_not_fail_first(tmp_path: Path) -> None:
    recording = _end_ray_workers(tmp_path, exit_code=1)
    lost = RAY_TRAIN.replace("bad batch\n", "[../pair.cc:537] Read error [127.0.0.1]:31646: Connection reset by peer.\n")
    recording.write_output(33, lost.format(pid=make_identity(0).pid))
    (dead,) = _find_dead(recording, 60)
    assert dead.headline == "Rank 1's process 101 died unexpectedly after 3 steps"


def test_an_exception_of_another_worker_of_ray_is_of_no_rank(tmp_path: Path) -> None:
    recording = _end_ray_workers(tmp_path, exit_code=1)
    recording.write_output(33, RAY_TRAIN.format(pid=99))
    (dead,) = _find_dead(recording, 60)
    assert "died unexpectedly" in dead.headline


def _lose_two_in_one_look(folder: Path, output: str, last_s: float) -> PlantedRecording:
    """A late sampler reports both ranks in any order. Rank 0 recorded until second 29, rank 1 until ``last_s``."""
    recording = record_two_steps(folder)
    rows = [make_span(last_s - 0.5, last_s, "step", 1, tables.BOUNDARY)]
    recording.write_records(tables.SPANS, make_identity(1), rows, born=1)
    recording.write_output(33, output)
    for rank in (0, 1):
        recording.write_event(make_identity(rank), 1.5, events.Hello, rank=rank, local_rank=rank)
        recording.write_event(recording.node, 33.2 + rank * 1e-5, events.RankGone, rank=rank, pid=make_identity(rank).pid)
    return recording


@pytest.mark.parametrize(("first", "last_s"), [(0, 31.5), (1, 26.5)])
def test_of_two_ranks_that_one_look_has_missed_the_one_that_was_outlived_ended_first(
    tmp_path: Path, first: int, last_s: float
) -> None:
    (dead,) = _find_dead(_lose_two_in_one_look(tmp_path, DEEPSPEED, last_s), 40)
    assert dead.headline == f"Rank {first} was killed by signal 9 (SIGKILL) after 2 steps"
    assert dead.ranks == (first,)


TOGETHER = "Ranks 0 and 1 ended within 0.05 s: which was first is not known."


@pytest.mark.parametrize("last_s", [28.9, 29.1])
@pytest.mark.parametrize(
    ("output", "headline", "what"),
    [
        (DEEPSPEED, "Rank 0 or 1 was killed by signal 9 (SIGKILL) after 2 steps", "Rank 0 or 1 was killed by SIGKILL"),
        ("step 2\n", "Ranks 0 and 1 died unexpectedly after 2 steps", "Ranks 0 and 1 died unexpectedly"),
    ],
    ids=["signal", "no report"],
)
def test_both_are_named_if_nothing_tells_which_ended_first(
    tmp_path: Path, output: str, headline: str, what: str, last_s: float
) -> None:
    recording = _lose_two_in_one_look(tmp_path, output, last_s)
    recording.write_event(recording.node, 34, events.JobEnded, exit_code=1, signal=None, text="The job failed.")
    (dead,) = _find_dead(recording, 40)
    assert (dead.headline, dead.ranks) == (headline, (0, 1))
    assert TOGETHER in dead.details
    assert "because of that" not in dead.details
    failure = find_failure(recording.open_recording().at(BEGIN_NS + 40 * S))
    assert failure is not None
    assert (failure.rank, failure.why.startswith(TOGETHER)) == (None, True)
    assert failure.what.startswith(what)


@pytest.mark.parametrize(
    ("output", "headline"),
    [
        (TORCHRUN.replace("4437", "101").replace("4436", "100"), "Rank 1 was killed by signal 9 (SIGKILL) after 2 steps"),
        (SRUN.replace("task 12", "task 1"), "Rank 1 was killed by signal 9 (SIGKILL) after 2 steps"),
        (
            '[rank0]: Traceback (most recent call last):\n[rank0]:   File "train.py", line 9, in <module>\n'
            "[rank0]: RuntimeError: Connection closed by peer\n" + DEEPSPEED,
            "Rank 1 was killed by signal 9 (SIGKILL) after 2 steps",
        ),
    ],
    ids=["torchrun", "srun", "lost peer"],
)
def test_a_launcher_or_a_lost_peer_orders_ends_in_one_look(tmp_path: Path, output: str, headline: str) -> None:
    (dead,) = _find_dead(_lose_two_in_one_look(tmp_path, output, 29.1), 40)
    assert (dead.headline, dead.ranks) == (headline, (1,))


STOP = TORCHRUN.replace("-9", "-15").replace("SIGKILL", "SIGTERM").replace("4437", "101").replace("4436", "100")
STOP = "\n".join(line for line in STOP.splitlines() if "closing signal" not in line) + "\n"
SENT = "W api.py:1028] Sending process 100 closing signal SIGTERM\n"


def test_a_signal_to_one_rank_is_none_of_its_launcher(tmp_path: Path) -> None:
    (dead,) = _find_dead(_lose_two_in_one_look(tmp_path, SENT + STOP, 29.1), 40)
    assert dead.headline == "Rank 1 was killed by signal 15 (SIGTERM) after 2 steps"
    assert "Launchers and schedulers stop all ranks at once: this signal was sent to rank 1 only." in dead.details
    assert dead.fix.endswith("-F a1=15")


def test_a_signal_to_all_ranks_that_their_launcher_did_not_send(tmp_path: Path) -> None:
    (dead,) = _find_dead(_lose_two_in_one_look(tmp_path, STOP, 29.1), 40)
    assert dead.headline == "Ranks 0 and 1 were killed by signal 15 (SIGTERM) at once after 2 steps"
    assert (dead.ranks, dead.fix) == ((0, 1), "")
    assert "because of that" not in dead.details
    assert "to rank 1 only" not in dead.details


def test_a_process_of_torch_multiprocessing_that_a_signal_ended(tmp_path: Path) -> None:
    output = "W spawn.py:165] Terminating process 100 via signal SIGTERM\n" + (
        "Traceback (most recent call last):\n"
        '  File "/lib/python3/site-packages/torch/multiprocessing/spawn.py", line 192, in join\n'
        "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGTERM\n"
    )
    (dead,) = _find_dead(_lose_two_in_one_look(tmp_path, output, 29.1), 40)
    assert dead.headline == "Rank 1 was killed by signal 15 (SIGTERM) after 2 steps"
    assert "as torch.multiprocessing printed" in dead.details


@pytest.mark.parametrize(
    ("pid", "headline"), [(101, "Rank 1 was killed by signal 9"), (999, "Rank 0 was killed by signal 15")]
)
def test_a_rank_that_wrote_nothing_before_it_was_killed(tmp_path: Path, pid: int, headline: str) -> None:
    """Only a process that the sampler saw as a rank of the job is named."""
    output = TORCHRUN.replace("4436", "100").replace("4437", str(pid)).replace(": 4 (", ": 0 (").replace(": 5 (", ": 1 (")
    recording = record_two_steps(tmp_path)
    recording.write_event(make_identity(0), 1.5, events.Hello, rank=0, local_rank=0)
    recording.write_event(recording.node, 1.6, events.RankFound, rank=1, pid=101)
    recording.write_event(recording.node, 31, events.RankGone, rank=0, pid=make_identity(0).pid, exit_code=-15)
    recording.write_output(32, output)
    recording.write_event(recording.node, 33, events.JobEnded, exit_code=1, signal=None, text="The job failed.")
    (dead,) = _find_dead(recording, 40)
    assert dead.headline.startswith(headline)
    assert dead.ranks == (int(pid == 101),)


def test_a_rank_that_ends_itself_after_a_signal_was_not_killed(tmp_path: Path) -> None:
    code = "E api.py:1002] failed (exitcode: 143) local_rank: 0 (pid: 100) of binary: python\n"
    (dead,) = _find_dead(_lose_two_ranks(tmp_path, code), 40)
    assert dead.headline == "Rank 0 ended with exit code 143 after 2 steps"
    assert "after SIGTERM" in dead.details


def test_a_signal_that_only_the_sampler_saw(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_event(make_identity(0), 1.5, events.Hello, rank=0, local_rank=0)
    recording.write_event(recording.node, 31, events.RankGone, rank=0, pid=make_identity(0).pid, exit_code=-9)
    recording.write_event(recording.node, 33, events.JobEnded, exit_code=0, signal=None, text="The job ended.")
    (dead,) = _find_dead(recording, 40)
    assert dead.headline == "Rank 0 was killed by signal 9 (SIGKILL) after 2 steps"


# As Python prints it where an exception ends the script, and one of its functions at exit is interrupted.
CRASHED_WORKER = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    loss.backward()
  File "/venv/lib/python3.12/site-packages/torch/utils/data/_utils/signal_handling.py", line 73, in handler
    _error_if_any_worker_fails()
{error}
Exception ignored in atexit callback: <function _MultiProcessingDataLoaderIter._clean_up_worker at 0x7f632dbde160>
Traceback (most recent call last):
  File "/usr/lib/python3.12/selectors.py", line 415, in select
    fd_event_list = self._selector.poll(timeout)
KeyboardInterrupt:
"""
CRASH = "RuntimeError: DataLoader worker (pid 2135) is killed by signal: Segmentation fault."


@pytest.mark.parametrize(
    ("error", "code", "headline"),
    [
        (CRASH, 1, "A DataLoader worker of rank 0 (PID 2135) crashed: Segmentation fault"),
        ("ValueError: planned", 1, "Rank 0 ended with ValueError at train.py:9"),
        ("KeyboardInterrupt", 1, None),
        ("KeyboardInterrupt", -2, None),
        ("ValueError: planned", -11, "Rank 0 was killed by signal 11 (SIGSEGV) after 2 steps"),
    ],
)
def test_an_exception_before_a_hang_at_exit_is_told_though_the_rank_said_goodbye(
    tmp_path: Path, error: str, code: int, headline: str | None
) -> None:
    """The sampler sees the rank's exit code before its parent has waited for it."""
    recording = record_two_steps(tmp_path)
    recording.write_event(make_identity(0), 1.5, events.Hello, rank=0, local_rank=0)
    recording.write_event(make_identity(0), 51, events.Goodbye)
    recording.write_event(recording.node, 52, events.RankGone, rank=0, pid=make_identity(0).pid, exit_code=code)
    recording.write_output(31, CRASHED_WORKER.format(error=error))
    recording.write_event(recording.node, 53, events.JobEnded, exit_code=code % 256, signal=None, text="The job failed.")
    assert [one.headline for one in _find_dead(recording, 60)] == ([] if headline is None else [headline])


@pytest.mark.parametrize(
    ("workers", "line", "said"),
    [
        ([2134, 2135], 30, " It read the dataset Store, whose __getitem__ begins at store.py:30."),
        ([2134, 2135], None, " It read the dataset Store."),
        ([2134], 30, ""),
    ],
)
def test_the_dataset_that_a_crashed_worker_read(tmp_path: Path, workers: list[int], line: int | None, said: str) -> None:
    recording = record_two_steps(tmp_path)
    place = {"file": "store.py", "line": line, "function": "Store.__getitem__"} if line is not None else {}
    recording.write_event(make_identity(0), 1.4, events.Hello, rank=0, local_rank=0)
    recording.write_event(make_identity(0), 1.5, events.LoaderStarted, workers=workers, dataset="Store", **place)
    recording.write_event(make_identity(0), 51, events.Goodbye)
    recording.write_event(recording.node, 52, events.RankGone, rank=0, pid=make_identity(0).pid, exit_code=1)
    recording.write_output(31, CRASHED_WORKER.format(error=CRASH))
    recording.write_event(recording.node, 53, events.JobEnded, exit_code=1, signal=None, text="The job failed.")
    (dead,) = _find_dead(recording, 60)
    assert dead.details.startswith(f"{CRASH}{said}")
    assert ("dataset" in dead.details) is bool(said)


@pytest.mark.parametrize(("pid", "crashed"), [(2135, True), (2136, False)])
def test_a_worker_of_which_the_last_exception_does_not_say_how_it_ended(pid: int, crashed: bool, tmp_path: Path) -> None:
    """PyTorch raises another exception while it handles the one that names the signal."""
    recording = record_two_steps(tmp_path)
    recording.write_event(make_identity(0), 1.5, events.Hello, rank=0, local_rank=0)
    recording.write_event(make_identity(0), 51, events.Goodbye)
    recording.write_event(recording.node, 52, events.RankGone, rank=0, pid=make_identity(0).pid, exit_code=1)
    last = f"RuntimeError: DataLoader worker (pid(s) {pid}) exited unexpectedly"
    chained = "\nThe above exception was the direct cause of the following exception:\n\n"
    frame = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    main()\n'
    recording.write_output(31, f"{frame}{CRASH}\n{chained}{frame}{last}\n")
    recording.write_event(recording.node, 53, events.JobEnded, exit_code=1, signal=None, text="The job failed.")
    (dead,) = _find_dead(recording, 60)
    assert ("crashed: Segmentation fault" in dead.headline) is crashed
    assert dead.details.startswith(last)


@pytest.mark.parametrize(("code", "said"), [(-15, "was killed by SIGTERM"), (None, "was killed by SIGINT")])
def test_the_jobs_signal_counts_only_where_nobody_saw_the_ranks(tmp_path: Path, code: int | None, said: str) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_records(tables.SPANS, make_identity(1), [make_span(29, 30, "step", 2, tables.BOUNDARY)], born=1)
    for rank in (0, 1):
        recording.write_event(make_identity(rank), 1.5, events.Hello, rank=rank, local_rank=rank)
        pid = make_identity(rank).pid
        recording.write_event(recording.node, 31 + rank, events.RankGone, rank=rank, pid=pid, exit_code=code)
    recording.write_event(recording.node, 33, events.JobEnded, exit_code=130, signal="SIGINT", text="The job was killed.")
    end = find_failure(recording.open_recording().at(BEGIN_NS + 40 * S))
    assert end is not None
    assert said in end.what
    assert (end.advice.startswith("Usually Ctrl-C"), end.fix) == (code is None, "")


@pytest.mark.parametrize(("end", "code"), [("os.kill(os.getpid(), 9)", -9), ("os._exit(3)", 3), ("os._exit(0)", None)])
def test_the_exit_code_of_a_process_whose_parent_has_not_waited(end: str, code: int | None) -> None:
    with subprocess.Popen([sys.executable, "-c", f"import os; {end}"]) as child:
        stat = procfs.read_stat(child.pid)
        assert stat is not None
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert procfs.read_exit_code(child.pid, stat.start) == code
        assert procfs.read_exit_code(child.pid, stat.start + 1) is None


def test_the_signal_is_that_of_the_rank_without_an_exception(tmp_path: Path) -> None:
    """DeepSpeed's launcher prints the command of the last rank, whichever was killed: here rank 1 has raised."""
    place = '[rank1]:   File "train.py", line 90, in <module>\n'
    lost = f"[rank1]: Traceback (most recent call last):\n{place}[rank1]: RuntimeError: Connection reset by peer\n"
    recording = _lose_two_ranks(tmp_path, lost + DEEPSPEED)
    events_file = next(path for path in tmp_path.glob("events-rank0-*.jsonl"))
    kept = [line for line in events_file.read_text().splitlines() if '"goodbye"' not in line]
    events_file.write_text("\n".join(kept) + "\n")
    (dead,) = _find_dead(recording, 40)
    assert dead.headline == "Rank 0 was killed by signal 9 (SIGKILL) after 2 steps"
    assert "Rank 1 failed because of that" in dead.details


@pytest.mark.parametrize(
    ("kills", "second", "is_sent"), [(0, 31.9, True), (1, 31.9, False), (-1, 31.9, False), (0, 31.0, False)]
)
def test_a_kill_that_was_not_the_kernels(tmp_path: Path, kills: int, second: float, is_sent: bool) -> None:
    """The control group counts the kernel's kills, if it is read after the rank was seen for the last time."""
    recording, node, pid = _lose_two_ranks(tmp_path, DEEPSPEED), make_identity(-1), make_identity(1).pid
    sizes = {29.9: 1 << 30, 31.1: 5 << 29}
    processes = [make_record(tables.PROCESSES, time_ns=int(at * S), rss_bytes=sizes[at], pid=pid, rank=1) for at in sizes]
    counts = {30.5: min(kills, 0), second: kills}
    hosts = [make_record(tables.HOSTS, time_ns=int(at * S), cgroup_oom_kills=counts[at]) for at in counts]
    recording.write_records(tables.PROCESSES, node, processes)
    recording.write_records(tables.HOSTS, node, hosts)
    (dead,) = _find_dead(recording, 40)
    assert ("a process sent the signal. Its host memory had grown by 1.50 GiB to 2.50 GiB" in dead.details) is is_sent
    assert ("watchdog" in dead.advice) is is_sent


def test_a_kill_is_reported_at_once_and_again_with_the_kernels_count(tmp_path: Path) -> None:
    """The finding says what the post-mortem says from then on."""
    recording, node, pid = _lose_two_ranks(tmp_path, DEEPSPEED), make_identity(-1), make_identity(1).pid
    recording.write_records(tables.PROCESSES, node, [make_record(tables.PROCESSES, time_ns=31 * S, pid=pid, rank=1)])
    counts = [make_record(tables.HOSTS, time_ns=int(at * S), cgroup_oom_kills=0) for at in (30.5, 32.5, 33)]
    recording.write_records(tables.HOSTS, node, counts)
    (first,), (last,) = _find_dead(recording, 32.4), _find_dead(recording, 40)
    assert "watchdog" not in first.advice
    assert "watchdog" in last.advice
    assert first.event == last.event
    assert BEGIN_NS + 32 * S <= first.known_ns < last.known_ns == BEGIN_NS + int(32.5 * S)
    end = recording.open_recording().at().end
    assert end is not None
    assert end.advice == last.advice


def test_a_kill_by_slurm_for_memory(tmp_path: Path) -> None:
    """Its daemon may count in another control group than the one that the sampler reads, which says that there was none."""
    text = "slurmstepd: error: Detected 1 oom_kill event in StepId=71.0. Some of the step tasks have been OOM Killed.\n"
    recording, node = _lose_two_ranks(tmp_path, f"{text}srun: error: node1: task 1: Out Of Memory\n"), make_identity(-1)
    hosts = [make_record(tables.HOSTS, time_ns=int(at * S), cgroup_oom_kills=0) for at in (30.5, 31.9)]
    recording.write_records(tables.HOSTS, node, hosts)
    (dead,) = _find_dead(recording, 40)
    assert dead.headline == "Rank 1 was killed by signal 9 (SIGKILL) after 3 steps"
    assert dead.details.startswith("Slurm printed that the job used more memory than it was given.")
    assert dead.advice.startswith("Give the job more host memory, or lower ")


def test_an_exception_is_named_with_its_line_and_not_that_of_a_rank_that_lost_its_peer(tmp_path: Path) -> None:
    recording = _lose_two_ranks(tmp_path, MIXED)
    first, fallen = find_ends(recording.open_recording().at(BEGIN_NS + 40 * S), recording.open_recording().sources["spans"])
    assert (first.process.rank, first.is_consequence, fallen.is_consequence) == (1, False, True)
    (dead,) = _find_dead(recording, 40)
    assert (dead.headline, dead.fix) == ("Rank 1 ended with ValueError at rows.py:12 in __getitem__", "rows.py:12")
    assert dead.details == "ValueError: row 7 is empty. Rank 0 failed because of that."


@pytest.mark.parametrize(
    ("check", "headline"),
    [
        ("Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d@t >= 0 && t < n_classes", "a target of the loss is none"),
        ("IndexKernel.cu:92: operator()@-sizes[i] <= index && index < sizes[i]", "an index is outside its tensor"),
        ("Indexing.cu:1553: indexSelectLargeIndex@srcIndex < srcSelectDimSize", "an index is outside its tensor"),
        ("Other.cu:7: check<float>@value == value", "a kernel on its GPU found that value == value does not hold"),
    ],
)
def test_a_check_that_fails_in_a_kernel_is_named(tmp_path: Path, check: str, headline: str) -> None:
    """CUDA prints it for each thread; Python's exception comes later, from the line that waits next."""
    kernel, assertion = check.split("@")
    printed = "".join(
        f"/pytorch/aten/{kernel}: block: [0,0,0], thread: [{thread},0,0] Assertion `{assertion}` failed.\n"
        for thread in range(3)
    )
    raised = MIXED.replace("ValueError: row 7 is empty", "torch.AcceleratorError: CUDA error: device-side assert triggered")
    (dead,) = _find_dead(_lose_two_ranks(tmp_path, printed + raised), 40)
    assert headline in dead.headline
    assert f"checks `{assertion}`" in dead.details
    assert dead.fix == "CUDA_LAUNCH_BLOCKING=1"


@pytest.mark.parametrize(
    ("message", "file", "headline"),
    [
        (
            "RuntimeError: stack expects each tensor to be equal size, but got [3, 64] at entry 0 and [3, 60] at entry 2",
            "site-packages/torch/utils/data/_utils/collate.py",
            "Rank 1 ended: the samples of a batch differ in shape, in a DataLoader worker",
        ),
        (
            "RuntimeError: Trying to resize storage that is not resizable",
            "site-packages/torch/utils/data/_utils/collate.py",
            "Rank 1 ended: the samples of a batch differ in shape, in a DataLoader worker",
        ),
        (
            "RuntimeError: stack expects each tensor to be equal size, but got [7] at entry 0 and [5] at entry 1",
            "run/data/rows.py",  # which are not samples
            "Rank 1 ended with RuntimeError at rows.py:12 in __getitem__",
        ),
    ],
)
def test_samples_that_make_no_batch_are_named(tmp_path: Path, message: str, file: str, headline: str) -> None:
    raised = MIXED.replace("ValueError: row 7 is empty", message).replace("/home/me/run/data/rows.py", f"/home/me/{file}")
    (dead,) = _find_dead(_lose_two_ranks(tmp_path, raised), 40)
    assert dead.headline == headline
    assert message in dead.details


def test_a_rank_that_was_interrupted_from_the_keyboard_did_not_die(tmp_path: Path) -> None:
    text = MIXED.replace("[rank1]: ValueError: row 7 is empty", "[rank1]: KeyboardInterrupt")
    assert _find_dead(_lose_two_ranks(tmp_path, text), 40) == []


def test_ranks_of_a_launcher_that_was_asked_to_end_did_not_die(tmp_path: Path) -> None:
    text = "W1122 20:09:02 43 torch/distributed/elastic/api.py:739] Received 15 death signal, shutting down workers"
    assert _find_dead(_lose_two_ranks(tmp_path, f"{text}\n{TORCHRUN}"), 40) == []


def test_an_exit_code_without_a_traceback(tmp_path: Path) -> None:
    (dead,) = _find_dead(_lose_two_ranks(tmp_path, DEEPSPEED.replace("-9", "3"), exit_code=3), 40)
    assert dead.headline == "Rank 1 ended with exit code 3 after 3 steps"
    assert "by os._exit(), or by compiled code: Python's functions at exit did not run." in dead.details


def test_how_a_rank_ended_after_the_probe_left_it_is_not_known(tmp_path: Path) -> None:
    recording = _lose_two_ranks(tmp_path, DEEPSPEED.replace("-9", "3"), exit_code=3)
    recording.write_event(make_identity(1), 25, events.Left, lost=0, step=1)
    assert all("os._exit()" not in one.details for one in _find_dead(recording, 40))


@pytest.mark.parametrize(
    ("status", "place", "headline", "fix"),
    [
        (
            3,
            {"file": "train.py", "line": 53, "function": "stop"},
            "Rank 1 ended by os._exit(3) at train.py:53 after 3 steps",
            "train.py:53",
        ),
        (3, {}, "Rank 1 ended by os._exit(3) after 3 steps", ""),
        (-1, {}, "Rank 1 ended by os._exit(-1) after 3 steps", ""),  # its exit code is 255
    ],
)
def test_the_line_that_calls_os_exit_is_named(
    tmp_path: Path, status: int, place: dict[str, Any], headline: str, fix: str
) -> None:
    recording = _lose_two_ranks(tmp_path, DEEPSPEED.replace("-9", str(status % 256)), exit_code=status % 256)
    recording.write_event(make_identity(1), 30, events.ExitCall, exit_code=status, **place)
    (dead,) = _find_dead(recording, 40)
    assert (dead.headline, dead.fix) == (headline, fix)


def test_a_real_death_names_its_signal() -> None:
    recording = recordings.open_recording("cpu-dead")
    (dead,) = (one for one in detect_findings(recording, recording.end_ns) if one.name == "dead_rank")
    assert dead.evidence["signal_number"] == 9


@pytest.mark.parametrize(("name", "told"), [("SIGKILL", True), ("SIGTERM", False), (None, False)])
def test_a_job_that_a_signal_killed_before_its_first_step(tmp_path: Path, name: str | None, told: bool) -> None:
    """One process without a launcher, which wrote no tables: its exit code is all that is known."""
    recording = PlantedRecording(tmp_path)
    recording.write_event(recording.node, 0, events.JobStarted, pid=100, start=1, command=["python", "train.py"])
    code = {"SIGKILL": 137, "SIGTERM": 143, None: 1}[name]
    recording.write_event(recording.node, 5, events.JobEnded, exit_code=code, signal=name, oom_kills=0, text="It failed.")
    dead = _find_dead(recording, 10)
    assert [str(one.headline) for one in dead] == [
        "The job was killed by signal 9 (SIGKILL) before its first step was finished"
    ] * told
    assert all("Process 100." in one.details and "Rank" not in one.details for one in dead)


@pytest.mark.parametrize(
    ("code", "seen", "command", "number"),
    [
        (137, 137, 50, None),
        (143, None, 100, None),
        (143, None, 50, 15),
        (143, None, None, 15),
        (-9, -9, 100, 9),
    ],
    ids=["its own", "the command's", "a shell's", "unknown", "a signal"],
)
def test_a_rank_that_ends_itself_with_the_code_of_a_signal(
    tmp_path: Path, code: int, seen: int | None, command: int | None, number: int | None
) -> None:
    recording = PlantedRecording(tmp_path)
    recording.write_event(make_identity(0), 0, events.Hello, rank=0, world_size=1)
    recording.write_records(tables.SPANS, make_identity(0), [make_span(1.0, 2.0, "forward", 0)])
    if command is not None:
        recording.write_event(recording.node, 0, events.JobStarted, pid=command, start=1, command=["python", "train.py"])
    known = {} if seen is None else {"exit_code": seen}
    recording.write_event(recording.node, 5, events.RankGone, rank=0, pid=100, **known)
    of_job: dict[str, object] = {"exit_code": code, "signal": None} if code > 0 else {"exit_code": 137, "signal": "SIGKILL"}
    recording.write_event(recording.node, 6, events.JobEnded, oom_kills=0, text="It failed.", **of_job)
    (dead,) = _find_dead(recording, 10)
    assert dead.evidence.get("signal_number") == number
    assert (f"ended with exit code {code}" in dead.headline) is (number is None)
    name = signal.Signals(number).name if number is not None else ""
    assert find_end_signal(recording.open_recording().at(BEGIN_NS + 10 * S)) == name
    assert build_overview(recording.open_recording()).why == name
    assert ("By custom" in dead.details) is (number is None)
