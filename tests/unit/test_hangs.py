"""Ranks that stand still: what each waits for, which one is odd, and what is said about it."""

from __future__ import annotations

from pathlib import Path

import pytest

import recordings
from memory_recording import PlantedRecording
from small_recording import make_identity, second_to_unix_ns
from stuck_ranks_recording import SAVING, SILENT_S, SLEEPING, WAITING, Left, Stand, write_standing
from zerotop.analysis.findings import Finding, Severity, detect_findings, link_findings
from zerotop.analysis.findings.ranks import hung_ranks
from zerotop.analysis.hangs.reader import find_stillness
from zerotop.analysis.hangs.stacks import StackFrame, ThreadStack
from zerotop.analysis.hangs.waits import Wait, WaitKind, find_wait
from zerotop.recording.reader import Recording
from zerotop.ui.app.viewer import Viewer
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, Glyphs
from zerotop.ui.drawing.rows import row_text, row_width
from zerotop.ui.ranks.stacks import copy_stacks, count_stack_rows, draw_stacks
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import ANOTHER_ITERATOR

ALL_REDUCE = Stand(WAITING, "wait")
SLEEP = Stand(SLEEPING, "time.sleep")
ITEM = Stand((("torch/_tensor.py", 5, "Tensor.item", False), *SLEEPING), "item")
STILL, WORKING = {25.0: 700, 30.0: 700, 40.0: 700}, {25.0: 700, 30.0: 900, 40.0: 1400}
BARRIER = Stand((("torch/distributed/distributed_c10d.py", 5356, "barrier", False), ("train.py", 94, "step", True)), "wait")

RAISED = 'Traceback (most recent call last):\n  File "/job/train.py", line 40, in step\n    time.sleep(3600)\n'


@pytest.fixture(autouse=True)
def while_it_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the recordings as if they were still written, except where a test is of one that has stopped."""
    if "recording_stopped" not in request.fixturenames:
        monkeypatch.setattr(Recording, "is_live", True)


@pytest.fixture
def recording_stopped() -> None:
    """For a recording that has stopped without the end of the job."""


def find_hung(recording: Recording, second: float) -> list[Finding]:
    return [finding for finding in detect_findings(recording, second_to_unix_ns(second)) if finding.name == "hung_ranks"]


@pytest.mark.parametrize(
    ("stand", "wait"),
    [
        (ALL_REDUCE, Wait(WaitKind.COLLECTIVE, "all_reduce")),
        (SLEEP, Wait(WaitKind.SLEEP, "time.sleep")),
        (Stand(SAVING, "write"), Wait(WaitKind.SAVE, "torch.save")),
        (
            Stand((("torch/cuda/streams.py", 108, "Stream.synchronize", False), *SLEEPING)),
            Wait(WaitKind.DEVICE, "synchronize"),
        ),
        (ITEM, Wait(WaitKind.DEVICE, "item")),
        (Stand(SLEEPING, "io.open"), Wait(WaitKind.FILE, "io.open")),
        (Stand(SLEEPING), Wait(WaitKind.OTHER, "")),
        (Stand((("numpy/core.py", 3, "sort", False), *SLEEPING)), Wait(WaitKind.OTHER, "sort")),
        (
            Stand((("torch/_dynamo/a.py", 9, "run", False), *SLEEPING), "sleep"),
            Wait(WaitKind.COMPILE, "torch.compile"),
        ),
        (
            Stand((("threading.py", 327, "Condition.wait", False), *SLEEPING), "acquire"),
            Wait(WaitKind.LOCK, "a lock"),
        ),
    ],
)
def test_the_wait_of_a_thread_is_read_from_its_stack(stand: Stand, wait: Wait) -> None:
    assert find_wait(ThreadStack("", stand.call, tuple(StackFrame(*frame) for frame in stand.frames))) == wait


BACKWARD = Stand(
    (("torch/autograd/graph.py", 869, "_engine_run_backward", False), ("train.py", 95, "step", True)), "run_backward"
)
READING = Stand(
    (("train.py", 59, "train", True), ("train.py", 118, "<module>", True)), "max", cores_used=1.0, reads_until_s=52
)


@pytest.mark.parametrize(("stand", "place"), [(READING, " at train.py:59"), (Stand((), reads_until_s=52), "")])
def test_a_rank_that_only_reads_batches_is_named(tmp_path: Path, stand: Stand, place: str) -> None:
    """It shows signs of life all the time, and may not have been sampled."""
    recording = write_standing(tmp_path, {0: BACKWARD, 1: stand, 2: BACKWARD}, (25, 30, 51))
    assert not find_hung(recording, 49)  # it may skip what it has trained with before
    (finding,) = find_hung(recording, 52)
    assert finding.ranks == (1,)
    assert str(finding.headline) == f"No progress for 30 s: rank 1 reads batches without training{place}"
    assert "Rank 1 has read 300 batches since the begin of step 10 and trained with none of them." in str(finding.details)
    assert "No rank trained;" in str(finding.details)
    stillness = find_stillness(recording.at(second_to_unix_ns(52)))
    assert stillness is not None
    assert [group.ranks for group in stillness.standstill.groups] == [(1,), (0, 2)]


@pytest.mark.parametrize(
    ("others", "reading"),
    [
        (BACKWARD._replace(reads_until_s=52), READING),  # all ranks prepare data
        (BACKWARD, READING._replace(reads_until_s=22)),  # a few batches are skipped
        (BARRIER, READING),  # it evaluates alone
        (BACKWARD, READING._replace(reads_flags=ANOTHER_ITERATOR)),  # the same, or it computes statistics of a data set
    ],
)
def test_ranks_that_read_for_a_reason_do_not_hang(tmp_path: Path, others: Stand, reading: Stand) -> None:
    stands = {0: others, 1: reading}
    found = find_hung(write_standing(tmp_path, stands, (25, 30, 51)), 52)
    assert not any("reads batches" in str(finding.headline) for finding in found)


def test_a_rank_that_has_read_for_long_and_then_trained_is_told_in_the_same_words(tmp_path: Path) -> None:
    recording = write_standing(tmp_path, {0: BACKWARD, 1: READING}, (25, 30, 51), went_on_s=55)
    (finding,) = find_hung(recording, 60)
    assert finding.severity is Severity.WARNING
    assert " and trained with none of them. No rank trained; " in str(finding.details)


def test_a_rank_that_reads_the_many_batches_of_a_step_slowly_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hung_ranks, "_READ_STEPS", 400)
    assert not find_hung(write_standing(tmp_path, {0: BACKWARD, 1: READING}, (25, 30, 51)), 52)


DESTROY = Stand(
    (
        ("torch/distributed/distributed_c10d.py", 2319, "destroy_process_group", False),
        ("common.py", 154, "finish", True),
        ("train.py", 99, "step", True),
        ("train.py", 120, "<module>", True),
    ),
    "shutdown",
    cores_used=1.0,
)


def test_a_rank_that_has_left_the_training_loop_is_named_with_its_line(tmp_path: Path) -> None:
    recording = write_standing(tmp_path, {0: DESTROY, 1: BACKWARD})
    (finding,) = find_hung(recording, 42)
    assert str(finding.headline) == "No progress for 10 s: rank 0 has left the training loop at train.py:99"
    assert str(finding.details).startswith(
        "Rank 0 has left the training loop after 10 steps, and waits in destroy_process_group at common.py:154 in finish,"
        " called from train.py:99 in step. Rank 1 waits in backward at train.py:95 in step."
    )
    assert (finding.ranks, str(finding.fix)) == ((0,), "train.py:99")
    assert str(finding.advice).startswith("Look for a break")


def test_ranks_may_wait_for_one_that_works_after_others_have_left(tmp_path: Path) -> None:
    """As in a process group without those."""
    working = Stand((("test.py", 7, "score", True),), "max", cores_used=1.0)
    assert not find_hung(write_standing(tmp_path, {0: DESTROY, 1: ALL_REDUCE, 2: working}), 42)


def test_ranks_that_may_both_have_left_the_loop_are_told_by_their_collectives(tmp_path: Path) -> None:
    (finding,) = find_hung(write_standing(tmp_path, {0: DESTROY, 1: BARRIER}), 42)
    assert "training loop" not in f"{finding.headline} {finding.details}"


def test_the_rank_that_is_in_no_collective_is_named(tmp_path: Path) -> None:
    recording = write_standing(tmp_path, {0: ALL_REDUCE, 1: SLEEP, 2: ALL_REDUCE, 3: ALL_REDUCE})
    assert find_hung(recording, 29.9) == []
    (hung,) = find_hung(recording, 60)
    assert hung.known_ns == second_to_unix_ns(30)
    assert (hung.ranks, hung.fix) == ((1,), "train.py:40")
    assert hung.headline == "No progress for 10 s: rank 1 is in time.sleep at train.py:40 in build_batch"
    assert "the last iterations before took" in hung.details
    assert "Ranks 0, 2, 3 wait in all_reduce at train.py:90 in step." in hung.details


@pytest.mark.usefixtures("recording_stopped")
def test_a_hang_lasts_to_the_end_of_a_recording_that_has_stopped(tmp_path: Path) -> None:
    recording = write_standing(tmp_path, {0: ALL_REDUCE, 1: ALL_REDUCE, 2: BARRIER})
    (hung,) = find_hung(recording, 60)
    assert hung.headline == "No progress for 20 s: rank 2 waited in barrier at train.py:94 in step"
    (before,) = find_hung(recording, 31)
    assert before.headline.startswith("No progress for 10 s: rank 2 waits")


def test_of_different_collectives_the_fewest_ranks_are_wrong(tmp_path: Path) -> None:
    recording = write_standing(tmp_path, {0: ALL_REDUCE, 1: ALL_REDUCE, 2: BARRIER})
    (hung,) = find_hung(recording, 60)
    assert hung.headline == "No progress for 10 s: rank 2 waits in barrier at train.py:94 in step"
    assert "same order" in hung.advice


@pytest.mark.parametrize("allocations", [None, WORKING])
def test_a_gpu_that_computes_while_others_wait_is_no_hang(tmp_path: Path, allocations: dict[float, int] | None) -> None:
    """As one rank's own evaluation. With a collective of its own that has not ended the rank would wait, too."""
    item = ITEM._replace(called=60, allocations=allocations)
    recording = write_standing(tmp_path, {0: ALL_REDUCE._replace(called=61), 1: item})
    assert find_hung(recording, 60) == []


def test_a_kernel_that_does_not_end_is_reported_where_nothing_else_runs_on_the_gpu(tmp_path: Path) -> None:
    """The thread that waits for it uses a core for that."""
    odd = ITEM._replace(called=60, allocations=STILL, cores_used=1.0)
    recording = write_standing(tmp_path, {0: ALL_REDUCE._replace(called=61), 1: odd})
    assert find_hung(recording, 34.9) == []
    (hung,) = find_hung(recording, 60)
    assert (hung.ranks, hung.fix) == ((1,), "train.py:40")
    assert hung.headline.endswith(" s: rank 1 waits for its GPU in item at train.py:40")
    assert "Rank 1 waits for its GPU in item at train.py:40 in build_batch." in hung.details
    assert "A kernel on the GPU does not finish" in hung.advice


@pytest.mark.parametrize(("allocations", "hangs"), [(STILL, 1), (WORKING, 0), (None, 0)])
def test_a_single_rank_that_waits_for_its_gpu_hangs_if_it_allocates_nothing(
    tmp_path: Path, allocations: dict[float, int] | None, hangs: int
) -> None:
    assert len(find_hung(write_standing(tmp_path, {0: ITEM._replace(allocations=allocations)}), 60)) == hangs


@pytest.mark.parametrize(("cores_used", "waiting_cores", "hangs"), [(0.1, 0.6, 0), (0.9, 0.0, 0), (0.1, 0.0, 1)])
def test_a_rank_that_computes_is_no_hang_even_if_others_take_the_cores(
    tmp_path: Path, cores_used: float, waiting_cores: float, hangs: int
) -> None:
    computing = Stand(SLEEPING, "sum", cores_used=cores_used, waiting_cores=waiting_cores)
    assert len(find_hung(write_standing(tmp_path, {0: ALL_REDUCE, 1: computing}), 60)) == hangs


def test_time_of_the_probes_threads_does_not_count_as_computing(tmp_path: Path) -> None:
    """While a function in C keeps Python's lock, they look for it again and again."""
    stuck = Stand(SLEEPING, "pause", cores_used=0.1, waiting_cores=0.3, own_cores=0.3)
    assert len(find_hung(write_standing(tmp_path, {0: ALL_REDUCE, 1: stuck}), 60)) == 1


def test_a_rank_that_went_on_after_its_collective_waits_in_it(tmp_path: Path) -> None:
    """As with NCCL, where only the GPU waits at first."""
    ahead = ITEM._replace(called=61, pending="all_reduce")
    (hung,) = find_hung(write_standing(tmp_path, {0: ahead, 1: SLEEP._replace(called=60), 2: ahead}), 60)
    assert hung.ranks == (1,)
    assert "Ranks 0 and 2 wait in all_reduce at train.py:40 in build_batch." in hung.details


def test_of_two_ranks_in_different_collectives_none_is_called_wrong(tmp_path: Path) -> None:
    stands = {0: BARRIER._replace(called=61), 1: ALL_REDUCE._replace(called=61)}
    (hung,) = find_hung(write_standing(tmp_path, stands), 60)
    assert hung.ranks == (0, 1)
    assert hung.headline == "No progress for 10 s: rank 0 waits in barrier, rank 1 waits in all_reduce"
    assert "Collective 61 is barrier on rank 0, all_reduce on rank 1." in hung.details


def test_the_rank_that_has_called_fewer_collectives_is_behind(tmp_path: Path) -> None:
    """At the same line, as of a loop over gradients of which one rank has left one out."""
    (hung,) = find_hung(write_standing(tmp_path, {0: ALL_REDUCE._replace(called=60), 1: ALL_REDUCE._replace(called=61)}), 60)
    assert hung.ranks == (0,)
    assert "Rank 0 has called 60 collectives, rank 1 has called 61." in hung.details


def test_ranks_that_wait_in_collectives_of_different_groups_name_who_has_not_called_them(tmp_path: Path) -> None:
    """They hang however long a checkpoint before that took, and though they use cores."""
    stands = {
        0: ALL_REDUCE._replace(groups=[("0", 60, -1, ""), ("tp", 9, 9, "all_reduce")], cores_used=1.0),
        1: BARRIER._replace(groups=[("0", 61, 61, "barrier"), ("tp", 8, -1, "")], cores_used=1.0),
        2: BARRIER._replace(groups=[("0", 61, 61, "barrier")], cores_used=1.0),
    }
    (hung,) = find_hung(write_standing(tmp_path, stands, phase="checkpoint_save"), 60)
    assert hung.headline == "No progress for 10 s: rank 0 waits in all_reduce at train.py:90 in step"
    assert "Rank 0 waits for all_reduce, which rank 1 has not called." in hung.details
    assert "Ranks 1 and 2 wait for barrier, which rank 0 has not called." in hung.details


@pytest.mark.parametrize(
    ("call", "said", "advice"),
    [
        ("__enter__", "Thread writer waits for a lock at log.py:7 in keep.", True),
        ("recv", "Thread writer is in recv at log.py:7 in keep.", False),
    ],
)
def test_the_thread_that_a_rank_waits_for_is_told(tmp_path: Path, call: str, said: str, advice: bool) -> None:
    stand = Stand(
        (("threading.py", 1149, "Thread.join", False), *SLEEPING),
        "acquire",
        other=("writer", call, ("log.py", 7, "keep", True)),
    )
    (hung,) = find_hung(write_standing(tmp_path, {0: stand}), 60)
    assert said in hung.details
    assert hung.advice.startswith("Threads wait for each other") is advice


@pytest.mark.parametrize(
    ("stand", "ended_s", "told"),
    [(SLEEP, 27.5, True), (SLEEP, 23.5, False), (Stand(SLEEPING, "io.open"), 27.5, False), (SLEEP, None, False)],
)
def test_a_job_that_is_killed_while_it_stands_still(tmp_path: Path, stand: Stand, ended_s: float | None, told: bool) -> None:
    """Sooner than a hang of a job that lives; a rank that reads a file may have been about to go on."""
    found = find_hung(write_standing(tmp_path, {0: ALL_REDUCE, 1: stand}, (22.9, 25), ended_s=ended_s), 29)
    headline = "No progress for 7.50 s before the end: rank 1 was in time.sleep at train.py:40"
    assert [one.headline for one in found] == [headline] * told


@pytest.mark.usefixtures("recording_stopped")
def test_a_watchdog_that_ends_ranks_follows_from_their_hang(tmp_path: Path) -> None:
    write_standing(tmp_path, {0: ALL_REDUCE, 1: SLEEP}, (25, 30))
    recording, pids = PlantedRecording(tmp_path), [make_identity(rank).pid for rank in (0, 1)]
    for rank, second in enumerate((39.9, 39.95)):
        place = {"file": "train.py", "line": 53, "function": "Watchdog.run"}
        recording.write_event(make_identity(rank), second, events.ExitCall, exit_code=1, **place)
        recording.write_event(recording.node, 40, events.RankGone, rank=rank, pid=pids[rank], exit_code=1)
    recording.write_output(
        40.1,
        f"W1129 18:26:09.295000 4 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process {pids[1]} closing"
        " signal SIGTERM\nE1129 18:26:09.304000 4 torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: 1)"
        f" local_rank: 0 (pid: {pids[0]}) of binary: python\n",
    )
    recording.write_event(recording.node, 40.5, events.JobEnded, exit_code=1, text="The job failed with exit code 1.")
    frame = Viewer(recordings.open_searched(recording.open_recording()), None, lambda: 0.0).make_frame()
    assert frame.failure is not None
    assert frame.headline is not None
    assert [cost.finding.name for cost in frame.ranked] == ["hung_ranks", "dead_rank"]
    dead = frame.ranked[1]
    assert (frame.headline.name, dead.cause) == ("hung_ranks", frame.headline)
    assert dead.finding.headline.startswith("Rank 0 ended by os._exit(1) at train.py:53")
    assert dead.finding.details.endswith("Rank 1 did so, too.")
    assert frame.summary is not None
    assert [cost.finding.name for cost in frame.summary.findings] == ["hung_ranks"]  # the end is told above it


def test_ranks_that_time_out_follow_from_their_hang_and_none_has_left_early(tmp_path: Path) -> None:
    """Each says goodbye after its exception; launchers stop those that are left meanwhile."""
    write_standing(tmp_path, {0: BARRIER, 1: ALL_REDUCE}, (25, 30))
    recording = PlantedRecording(tmp_path)
    error = (
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 18000ms for recv operation to complete"
    )
    for rank, second in ((1, 42.9), (0, 42.8)):
        text = f'Traceback (most recent call last):\n  File "/job/train.py", line 9{rank}, in step\n{error}\n'
        recording.write_output(second - 0.1, "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines()))
        recording.write_event(make_identity(rank), second, events.Goodbye, lost=0, step=9)
        recording.write_event(recording.node, 43, events.RankGone, rank=rank, pid=make_identity(rank).pid, exit_code=1)
    recording.write_event(recording.node, 43.5, events.JobEnded, exit_code=1, text="The job failed with exit code 1.")
    opened = recording.open_recording()
    linked = link_findings(detect_findings(opened, second_to_unix_ns(50)))
    (dead,) = (one for one in linked if one.finding.name == "dead_rank")
    assert "ended with RuntimeError at train.py:9" in dead.finding.headline
    assert "failed because of that" not in dead.finding.details
    assert dead.cause is not None
    assert dead.cause.name == "hung_ranks"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("W1128 19:30:42.820000 3287 api.py:739] Received 2 death signal, shutting down workers\n", True),
        (f"{RAISED}KeyboardInterrupt\n", True),
        (f"{RAISED}ValueError: no more data\n", False),
    ],
)
def test_a_job_that_is_interrupted_while_it_stands_still(tmp_path: Path, text: str, told: bool) -> None:
    """Its ranks then end as after their last step."""
    stands = {0: ALL_REDUCE, 1: SLEEP}
    found = find_hung(write_standing(tmp_path, stands, (22.9, 25), left=Left(27.6, 1, text)), 29)
    headline = "No progress for 7.50 s before the end: rank 1 was in time.sleep at train.py:40"
    assert [one.headline for one in found] == [headline] * told


@pytest.mark.parametrize(("left", "shown"), [(Left(50, 1, is_raised=True), True), (Left(50, 0), False)])
def test_the_stacks_of_a_job_that_was_ended_are_those_from_before(tmp_path: Path, left: Left, shown: bool) -> None:
    recording = write_standing(tmp_path, {0: ALL_REDUCE, 1: SLEEP}, ended_s=50.5, left=left)
    stillness = find_stillness(recording.at(second_to_unix_ns(60)))
    assert (stillness is not None) is shown
    if stillness is not None:
        assert [group.end for group in stillness.standstill.groups] == [None, None]
        assert stillness.since_ns == second_to_unix_ns(SILENT_S)


AHEAD = ITEM._replace(pending="all_reduce")
WITH_BARRIER = ((60, "all_reduce", 90), (61, "all_reduce_barrier", 94), (62, "all_reduce", 90))  # as NCCL's are recorded
WITHOUT = ((60, "all_reduce", 90), (61, "all_reduce", 90))


def test_a_rank_that_waits_in_no_collective_has_no_calls_to_wait_for(tmp_path: Path) -> None:
    stands = {0: ALL_REDUCE._replace(called=61, calls=WITHOUT), 1: SLEEP._replace(called=60)}
    (hung,) = find_hung(write_standing(tmp_path, stands, (25, 30)), 34)
    assert hung.headline == "No progress for 10 s: rank 1 is in time.sleep at train.py:40 in build_batch"


def test_of_two_ranks_with_different_collectives_both_are_named_with_the_first_that_differs(tmp_path: Path) -> None:
    """With NCCL they wait for their GPUs, in the same line, one collective apart."""
    stands = {0: AHEAD._replace(called=61, calls=WITHOUT), 1: AHEAD._replace(called=62, calls=WITH_BARRIER)}
    (hung,) = find_hung(write_standing(tmp_path, stands), 60)
    assert (hung.ranks, hung.fix) == ((0, 1), "train.py:94")
    assert hung.headline == "No progress for 10 s: rank 1 called barrier where rank 0 called all_reduce"
    said = "Collective 61 is barrier at train.py:94 in step on rank 1, all_reduce at train.py:90 in step on rank 0."
    assert said in hung.details
    assert "same order" in hung.advice


def test_a_job_that_was_stopped_stood_still_until_then(tmp_path: Path) -> None:
    recording = write_standing(tmp_path, {0: ALL_REDUCE, 1: SLEEP}, ended_s=59)
    (hung,), (over,) = find_hung(recording, 50), find_hung(recording, 70)
    assert hung.headline == "No progress for 10 s: rank 1 is in time.sleep at train.py:40 in build_batch"
    assert over.headline == f"No progress for {59 - SILENT_S:.0f} s: rank 1 was in time.sleep at train.py:40 in build_batch"
    assert over.details.startswith("Rank 0 waited in all_reduce at train.py:90 in step.")
    assert (hung.event, over.severity) == (over.event, Severity.ERROR)


@pytest.mark.parametrize("stacks_s", [(25, 30, 40), ()])
def test_a_job_that_goes_on_did_not_fail(tmp_path: Path, stacks_s: tuple[float, ...]) -> None:
    recording = write_standing(tmp_path, {0: ALL_REDUCE, 1: SLEEP}, stacks_s, went_on_s=70)
    (hung,), (over,) = find_hung(recording, 60), find_hung(recording, 80)
    assert (hung.severity, over.severity) == (Severity.ERROR, Severity.WARNING)
    assert hung.event == over.event
    assert over.headline.startswith("No progress for 51 s")
    assert over.details.endswith("It went on in step 10.")
    assert over.evidence["silent_s"] == pytest.approx(51, abs=1.1)


def test_a_hang_that_was_reported_without_stacks_is_reported_again_with_them(tmp_path: Path) -> None:
    recording = write_standing(tmp_path, {0: ALL_REDUCE, 1: Stand(SLEEPING, "sleep")}, written_s=(80, 85))
    (unseen,) = find_hung(recording, 60)
    (hung,) = find_hung(recording, 100)
    assert (unseen.fix, hung.fix) == ("py-spy dump --pid 100", "train.py:40")
    assert (hung.ranks, hung.begin_ns) == ((1,), unseen.begin_ns)


def test_collectives_are_known_where_py_spy_has_seen_the_rank_last(tmp_path: Path) -> None:
    stands = {0: AHEAD._replace(called=61, calls=WITHOUT, seen_s=(30,)), 1: AHEAD._replace(called=62, calls=WITH_BARRIER)}
    (hung,) = find_hung(write_standing(tmp_path, stands), 60)
    assert hung.headline == "No progress for 10 s: rank 1 called barrier where rank 0 called all_reduce"


def test_ranks_in_different_collectives_hang_even_if_they_use_cores(tmp_path: Path) -> None:
    stands = {rank: ALL_REDUCE._replace(called=61, calls=WITHOUT, waiting_cores=1.0) for rank in (0, 2)}
    stands[1] = ALL_REDUCE._replace(called=62, calls=WITH_BARRIER, waiting_cores=1.0)
    (hung,) = find_hung(write_standing(tmp_path, stands), 60)
    assert hung.headline == "No progress for 10 s: rank 1 called barrier where the others called all_reduce"


def test_of_three_ranks_the_one_that_has_called_another_collective_is_odd(tmp_path: Path) -> None:
    stands = {rank: AHEAD._replace(called=61, calls=WITHOUT) for rank in (0, 2)}
    stands[1] = AHEAD._replace(called=62, calls=WITH_BARRIER)
    (hung,) = find_hung(write_standing(tmp_path, stands), 60)
    assert (hung.ranks, hung.fix) == ((1,), "train.py:94")
    assert hung.headline == "No progress for 10 s: rank 1 called barrier where the others called all_reduce"


@pytest.mark.parametrize(
    ("file", "function", "shown"),
    [
        ("train.py", "build_batch", " at train.py:40 in build_batch"),
        ("train.py", "build_batch_of_long_rows", " at train.py:40"),
        ("examples/pretraining/of_a_long_name/train.py", "build", ""),
    ],
)
def test_a_headline_leaves_out_what_does_not_fit(tmp_path: Path, file: str, function: str, shown: str) -> None:
    stand = Stand(((file, 40, function, True),), "time.sleep")
    (hung,) = find_hung(write_standing(tmp_path, {0: ALL_REDUCE, 1: stand}), 60)
    assert hung.headline == f"No progress for 10 s: rank 1 is in time.sleep{shown}"
    assert len(hung.headline) <= 80
    assert f"{file}:40 in {function}" in f"{hung.headline} {hung.details}"


def test_ranks_that_all_wait_in_one_place_have_no_odd_one(tmp_path: Path) -> None:
    (hung,) = find_hung(write_standing(tmp_path, {0: ALL_REDUCE, 1: ALL_REDUCE}), 60)
    assert (hung.ranks, hung.headline) == (
        (0, 1),
        "No progress for 10 s: all ranks wait in all_reduce at train.py:90 in step",
    )
    assert hung.details.startswith("No phase began or ended")  # where they are is said once
    assert hung.advice.startswith("All ranks are in it: compare the tensors that they pass")  # they are on one node


def test_a_rank_whose_python_does_not_run_is_the_odd_one(tmp_path: Path) -> None:
    recording = write_standing(tmp_path, {0: ALL_REDUCE, 1: None})
    assert find_hung(recording, 30) == []
    (hung,) = find_hung(recording, 60)
    assert "rank 1 is silent in C code" in hung.headline
    assert hung.known_ns <= second_to_unix_ns(SILENT_S + 20)


def test_saving_is_no_hang_before_ten_minutes(tmp_path: Path) -> None:
    recording = write_standing(tmp_path, {0: ALL_REDUCE, 1: Stand(SAVING, "write")}, (25, 30, 40, 60, 100, 180, 340))
    assert find_hung(recording, 600) == []
    (hung,) = find_hung(recording, 640)
    assert "rank 1 is in torch.save at train.py:71 in save" in hung.headline


@pytest.mark.parametrize("function", ["_clean_up_worker", "_shutdown_workers", "__del__"])
def test_loader_workers_that_end_slowly_are_no_hang(tmp_path: Path, function: str) -> None:
    """At the end of a job PyTorch waits up to 5 s for each worker that persists and copies to pinned memory."""
    method = f"_MultiProcessingDataLoaderIter.{function}"
    frames = (
        ("selectors.py", 415, "_PollLikeSelector.select", False),
        ("multiprocessing/process.py", 149, "BaseProcess.join", False),
        ("torch/utils/data/dataloader.py", 1703, method, False),
    )
    for waiting in ({}, {0: ALL_REDUCE}):  # alone, or while another rank waits for one that an exception has ended
        (folder := tmp_path / str(len(waiting))).mkdir()
        ending = write_standing(folder, {**waiting, len(waiting): Stand(frames, "poll")}, (25, 30, 40, 60, 100, 180))
        names = {finding.name for finding in detect_findings(ending, second_to_unix_ns(200))}
        assert not names & {"hung_ranks", "long_pause"}
    (tmp_path / "other").mkdir()
    loading = (*frames[:2], ("torch/utils/data/dataloader.py", 740, "_BaseDataLoaderIter.__next__", False))
    (hung,) = find_hung(write_standing(tmp_path / "other", {0: Stand(loading, "poll")}, (25, 30, 40)), 60)
    assert "waits for the data loader" in hung.headline


def test_a_rank_that_moves_on_between_its_stacks_does_not_hang(tmp_path: Path) -> None:
    recording = write_standing(tmp_path, {0: ALL_REDUCE, 1: SLEEP}, (25,))
    assert find_hung(recording, 60) == []


@pytest.mark.parametrize(("width", "height"), [(78, 14), (118, 12), (196, 30), (20, 3)])
@pytest.mark.parametrize("glyphs", [BLOCKS, ASCII], ids=["blocks", "ascii"])
def test_the_stacks_are_drawn_in_any_size(tmp_path: Path, width: int, height: int, glyphs: Glyphs) -> None:
    standstill = find_stillness(write_standing(tmp_path, {0: ALL_REDUCE, 1: SLEEP, 2: ALL_REDUCE}).at(second_to_unix_ns(42)))
    assert standstill is not None
    rows = draw_stacks(standstill, second_to_unix_ns(42), width, height, glyphs, with_sentences=True)
    assert len(rows) == height
    assert {row_width(row) for row in rows} == {width}
    if width > 20:
        text = "\n".join(row_text(row) for row in rows)
        parts = (
            "nothing has moved for 22 s",
            "train.py:40 in build_batch",
            "2 ranks  0, 2  wait in all_reduce",
            "train.py:90",
        )
        assert [part for part in parts if part not in text] == []
        assert count_stack_rows(standstill, width, glyphs, with_sentences=True) >= 10


def test_all_stacks_are_copied(tmp_path: Path) -> None:
    standstill = find_stillness(write_standing(tmp_path, {0: ALL_REDUCE, 1: SLEEP}).at(second_to_unix_ns(42)))
    assert standstill is not None
    first, second = copy_stacks(standstill.standstill).split("\n\n")
    assert first == "ranks 1: in time.sleep\n  time.sleep()\n  train.py:40 in build_batch\n  train.py:118"
    assert "torch/distributed/distributed_c10d.py:3252 in all_reduce" in second


LOADING = Stand((("torch/utils/data/dataloader.py", 1275, "_try_get_data", False), ("train.py", 30, "run", True)), "poll")
FETCH = (
    ("store.py", 12, "Items.fetch", True),
    ("torch/utils/data/_utils/fetch.py", 54, "fetch", False),
    ("torch/utils/data/_utils/worker.py", 349, "_worker_loop", False),
    ("train.py", 30, "run", True),
)


@pytest.mark.parametrize(
    ("stand", "pid", "said"),
    [(LOADING, 100, True), (LOADING, 4711, False), (SLEEP, 100, False)],
    ids=["own", "other", "none"],
)
def test_the_worker_that_a_rank_waits_for_is_told_with_its_line(tmp_path: Path, stand: Stand, pid: int, said: bool) -> None:
    assert make_identity(0).pid == 100
    write_standing(tmp_path, {0: stand}, (25, 30))
    recording, frames = PlantedRecording(tmp_path), [StackFrame(*one)._asdict() for one in FETCH]
    stacks = [{"count": 1, "call": "acquire", "frames": list(range(len(FETCH)))}]
    facts = {"rank": 0, "pid": pid, "worker": 300, "frames": frames, "stacks": stacks}
    recording.write_event(recording.node, 28, events.LoaderStacks, **facts)
    (hung,) = find_hung(recording.open_recording(), 34)
    line = "py-spy shows a worker of the loader at store.py:12 in Items.fetch (calls acquire)."
    assert (line in hung.details) is said
    assert (hung.fix == "store.py:12", "the worker's line" in hung.advice) == (said, said)


def test_ranks_that_work_do_not_stand_still(tmp_path: Path) -> None:
    recording = write_standing(tmp_path, {0: ALL_REDUCE, 1: SLEEP})
    assert find_stillness(recording.at(second_to_unix_ns(19))) is None
    assert find_stillness(recording.at(second_to_unix_ns(22))) is None
    assert find_stillness(recording.at(second_to_unix_ns(26))) is not None
