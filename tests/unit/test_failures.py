"""The block that says why a job died, and the deaths that are none."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recordings
from memory_recording import OOM, PlantedRecording, gib_to_bytes, make_reading, record_two_steps
from small_recording import BEGIN_NS, S, make_identity, make_span, read_recording, write_table
from zerotop.analysis.failures.diagnosis import find_failure, find_known_failure
from zerotop.analysis.failures.end import ERROR, MEMORY, SIGNAL, End
from zerotop.analysis.failures.last_moments import LastSpan, describe_failed_place, describe_place, find_largest_batch
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.views.memory_view import read_memory_view
from zerotop.recording.keys import identify_process
from zerotop.recording.moments.process_exits import ProcessExit, describe_exit_code
from zerotop_probe.recording import events, tables
from zerotop_probe.recording.tables import EVAL, FAILED, SPANS


def end_job(recording: PlantedRecording, at_s: float, **facts: Any) -> None:
    usual_end = {"exit_code": 1, "signal": None, "seconds": 30, "oom_kills": 0, "text": "The job failed with exit code 1."}
    recording.write_event(recording.node, at_s, events.JobEnded, **(usual_end | facts))


def end_rank(recording: PlantedRecording, at_s: float, rank: int = 0) -> None:
    recording.write_event(recording.node, at_s, events.RankGone, rank=rank, pid=make_identity(rank).pid)


def find_checked_failure(recording: PlantedRecording, second: float = 40) -> End | None:
    opened, cursor = recording.open_recording(), BEGIN_NS + int(second * S)
    failure = find_known_failure(opened.at(cursor))
    assert failure == find_failure(opened.at(cursor))
    return failure


def require_failure(recording: PlantedRecording, second: float = 40) -> End:
    failure = find_checked_failure(recording, second)
    assert failure is not None
    return failure


def test_a_clean_exit_is_no_failure(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    assert find_checked_failure(recording, 29) is None
    recording.write_event(make_identity(0), 29.2, events.Goodbye)
    end_rank(recording, 29.5)
    end_job(recording, 30, exit_code=0)
    assert find_checked_failure(recording, 29.6) is None
    assert find_checked_failure(recording) is None


def test_a_gpu_without_room(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_event(make_identity(0), 25, events.OutOfMemory, **OOM)
    assert find_checked_failure(recording, 24.9) is None
    failure = require_failure(recording, 25)
    assert (failure.kind, failure.rank, failure.final) == (MEMORY, 0, False)
    assert failure.what == "Rank 0 ran out of GPU memory in backward of step 1."
    assert failure.where == "GPU 0 of node1, micro-step 0, micro-batch of 4 x 512 tokens"
    numbers = {number.label: (number.bytes, number.of_bytes) for number in failure.numbers}
    assert numbers["free"] == (gib_to_bytes(20), gib_to_bytes(79))
    # 14.5 are parameters, master weights, state and buffers, 2 are the gradients that the backward makes.
    assert numbers["of which activations"] == (gib_to_bytes(50 - 14.5 - 0.125), None)
    assert numbers["reserved but unused"] == (gib_to_bytes(3), None)
    assert failure.setting in failure.advice


def test_free_memory_beyond_a_limit_is_that_of_the_device(tmp_path: Path) -> None:
    """It said "free 66.55 of 12.00 GiB"."""
    recording = record_two_steps(tmp_path)
    recording.write_event(make_identity(0), 25, events.OutOfMemory, **(OOM | {"limit_bytes": gib_to_bytes(52)}))
    numbers = {number.label: (number.bytes, number.of_bytes) for number in require_failure(recording, 25).numbers}
    assert numbers["free"][1] == gib_to_bytes(79)
    assert numbers["allocated"] == (gib_to_bytes(50), gib_to_bytes(52))


def test_flushes_of_the_failed_request_are_counted(tmp_path: Path) -> None:
    """The allocator's last reading comes after the error, and Memory shows the moment of the error."""
    recording = record_two_steps(tmp_path, make_reading(29.7, 15, 22, step=1, retries=2, ooms=1))
    recording.write_event(make_identity(0), 29.6, events.OutOfMemory, **OOM)
    end_rank(recording, 29.8)
    end_job(recording, 30)
    view = read_memory_view(recording.open_recording().at(BEGIN_NS + 40 * S))
    assert view.moment_ns < BEGIN_NS + int(29.7 * S)
    assert view.health is not None
    assert (view.health.retries, view.health.ooms) == (2, 1)


def test_memory_at_a_failure_has_the_rank_that_vanished_first(tmp_path: Path) -> None:
    """Its GPU was said to be used by no rank."""
    recording = record_two_steps(tmp_path)
    recording.write_records(tables.SPANS, make_identity(1), [make_span(29, 30, "step", 2, tables.BOUNDARY)], born=1)
    for rank in (0, 1):
        pid = make_identity(rank).pid
        recording.write_event(recording.node, 31 + rank / 10, events.RankGone, rank=rank, pid=pid, exit_code=-15)
    end_job(recording, 33)
    view = read_memory_view(recording.open_recording().at(BEGIN_NS + 40 * S))
    assert view.gpu is not None
    assert view.gpu.ranks == (0,)
    assert view.moment_text == "at the failure"


def test_an_error_that_the_job_lived_on_after_is_no_death(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_event(make_identity(0), 19.5, events.OutOfMemory, **OOM)
    assert require_failure(recording, 19.6).final is False
    assert find_checked_failure(recording, 23.5) is None
    end_job(recording, 30, text="The job failed with exit code 1.")
    assert require_failure(recording).kind == ERROR


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"signal": "SIGTERM", "exit_code": 143}, "SIGTERM"),
        ({"signal": None, "exit_code": 247}, "SIGKILL"),  # DeepSpeed's launcher ends with its rank's -9
        ({"signal": None, "exit_code": 135}, "SIGBUS"),
    ],
)
def test_a_rank_ended_by_a_signal(tmp_path: Path, facts: dict[str, Any], name: str) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_event(make_identity(0), 1.5, events.Hello, rank=0, launcher="deepspeed")
    end_rank(recording, 26)
    early = require_failure(recording, 26.5)
    assert early.what == "Rank 0 (PID 100) died unexpectedly in backward of step 1."
    end_job(recording, 27, **facts)
    failure = require_failure(recording)
    assert failure.what == f"Rank 0 (PID 100) was killed by {name} in backward of step 1."
    assert (failure.kind, failure.unix_ns, failure.final) == (SIGNAL, BEGIN_NS + 26 * S, True)
    assert failure.setting in failure.advice


@pytest.mark.parametrize(
    ("job_s", "what"),
    [(30, "The job was killed by SIGINT."), (26.1, "Rank 0 (PID 100) was killed by SIGINT in backward of step 1.")],
)
def test_a_signal_to_a_launcher_whose_rank_had_left(tmp_path: Path, job_s: float, what: str) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_event(make_identity(0), 25.9, events.Goodbye)
    end_rank(recording, 26)
    end_job(recording, job_s, signal="SIGINT", exit_code=130)
    assert require_failure(recording).what == what


def test_what_came_last_has_one_preposition() -> None:
    span = LastSpan("init", 0, 1.0, 0, 0, 0, failed=False)
    assert describe_failed_place([span]) == " after engine initialization"


def test_one_whose_place_was_taken_by_another_is_no_death(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    end_rank(recording, 26)
    again = [make_span(32, 33, "forward"), make_span(33, 34, "backward")]
    recording.write_records(tables.SPANS, make_identity(0, pid=500), again, born=31)
    assert find_checked_failure(recording, 30) is not None
    assert find_checked_failure(recording, 34) is None


def test_a_job_that_somebody_stopped_did_not_die(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_event(recording.node, 25, events.StopSent)
    end_rank(recording, 26)
    end_job(recording, 27, signal="SIGTERM", exit_code=143)
    assert find_checked_failure(recording) is None


def _make_traceback(prefix: str, error: str) -> str:
    lines = ("Traceback (most recent call last):", '  File "/home/me/train.py", line 71, in save', "    write()", error)
    return "".join(f"{prefix}{line}\n" for line in lines)


def test_a_job_that_failed_by_itself(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_records(tables.SPANS, make_identity(1), [make_span(30, 31, "forward", 2, FAILED)], born=1)
    recording.write_output(
        31,
        _make_traceback("[rank1]: ", "ValueError: a shape")
        + _make_traceback("[rank0]: ", "torch.distributed.DistBackendError: gone"),
    )
    for rank in (0, 1):
        recording.write_event(make_identity(rank), 31.5, events.Goodbye)
    end_job(recording, 32)
    failure = require_failure(recording)
    assert (failure.kind, failure.rank, failure.what) == (ERROR, 1, "Rank 1 failed in forward of step 2.")
    assert failure.why == "ValueError: a shape, at train.py:71 in save."
    assert failure.advice == "Its output has the traceback."
    assert failure.where == "on node1"


def test_a_job_that_failed_before_any_rank_was_there(tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    end_job(recording, 3)
    failure = require_failure(recording)
    assert (failure.what, failure.rank) == ("The job failed with exit code 1.", None)
    assert failure.why == "Its output names no exception."


@pytest.mark.parametrize(
    ("code", "launcher", "name"),
    [
        (None, "", None),
        (1, "deepspeed", None),
        (2, "", None),
        (137, "", "SIGKILL"),
        (137, "deepspeed", "SIGKILL"),
        (247, "deepspeed", "SIGKILL"),
        (241, "deepspeed", "SIGTERM"),
        (247, "", None),
        (250, "torchrun", None),
        (255, "deepspeed", None),
    ],
)
def test_which_signal_an_exit_code_means(code: int | None, launcher: str, name: str | None) -> None:
    assert ProcessExit("", 0, exit_code=code, launcher=launcher).signal_name == name
    if code is not None:
        assert describe_exit_code(code, name or "") == f"exit code {code}" + (f" ({name})" if name else "")


_DEEPSPEED_SAYS = "[launch.py:325:sigkill_handler] ['python', 'train.py', '--local_rank=0'] exits with return code = {}\n"


@pytest.mark.parametrize(
    ("launcher", "printed", "what"),
    [
        ("python", "", "Rank 0 failed"),
        ("deepspeed", "", "was killed by SIGABRT"),
        ("python", _DEEPSPEED_SAYS.format(-6), "was killed by SIGABRT"),
        ("deepspeed", _DEEPSPEED_SAYS.format(250), "Rank 0 failed"),
    ],
)
def test_a_program_that_exits_with_250_was_not_killed(tmp_path: Path, launcher: str, printed: str, what: str) -> None:
    """DeepSpeed's launcher turns signal 6 into 250."""
    recording = record_two_steps(tmp_path)
    recording.write_event(make_identity(0), 1.5, events.Hello, rank=0, local_rank=0, launcher=launcher)
    recording.write_event(make_identity(0), 29.2, events.Goodbye)
    recording.write_output(29.4, printed or "bye\n")
    end_job(recording, 30, exit_code=250, text="The job failed with exit code 250.")
    assert what in require_failure(recording).what


@pytest.mark.parametrize(
    ("phase", "outer", "step", "words"),
    [
        ("forward", "eval", 4, " in the forward of the evaluation before step 4"),
        ("eval", "eval", None, " in the evaluation"),
        ("cpu_optimizer", "step", 2, " in cpu optimizer of step 2"),
        ("init", "init", 0, " during engine initialization"),
        ("", "", 3, " in step 3"),
        ("", "", None, ""),
    ],
)
def test_the_place_of_a_failure_in_words(phase: str, outer: str, step: int | None, words: str) -> None:
    assert describe_place(phase, outer, step) == words


def test_a_recorded_sigkill_is_named() -> None:
    dead = recordings.open_recording("cpu-dead")
    failure = find_failure(dead.at(dead.last_written_ns))
    assert failure is not None
    assert failure.what.startswith("Rank 1 (PID 29690) was killed by SIGKILL")


@pytest.mark.parametrize("name", ["cpu-dead", "hardware-bus", "blind-early-end"])
def test_the_post_mortem_and_the_finding_are_views_of_one_record(name: str) -> None:
    recording = recordings.open_recording(name)
    (dead,) = (one for one in detect_findings(recording, recording.end_ns) if one.name == "dead_rank")
    # A job whose ranks end in good order fails when its command ends.
    known = (recording.at(time_ns).end for time_ns in (dead.known_ns, recording.end_ns))
    end = next(end for end in known if end is not None)
    assert (end.advice, end.ranks, end.unix_ns) == (dead.advice, dead.ranks, dead.begin_ns)


def test_a_job_that_was_started_again_had_died_in_between() -> None:
    recording = recordings.open_recording("held-restart")
    begin = recording.begin_ns
    length = recording.last_written_ns - begin
    told = [find_known_failure(recording.at(begin + length * part // 100)) is not None for part in range(101)]
    assert any(told)
    assert not told[0]
    assert not told[-1]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12), st.lists(st.integers(0, 14), min_size=1, max_size=6)
)
def test_the_largest_batch_before_any_moment(batches: list[tuple[int, bool]], moments: list[int]) -> None:
    """Moments go forward, as in a search for findings, or back."""
    with tempfile.TemporaryDirectory() as folder:
        spans = [
            make_span(number, number + 1, "forward", flags=EVAL if evaluating else 0, tokens=tokens)
            for number, (tokens, evaluating) in enumerate(batches)
        ]
        write_table(Path(folder), SPANS, make_identity(0), *spans).close()
        recording = read_recording(Path(folder))
        process = identify_process(recording.sources["spans"][0])
        for moment in moments:
            known = [tokens for tokens, evaluating in batches[: max(0, moment - 1)] if not evaluating]
            batch = find_largest_batch(recording.at(BEGIN_NS + moment * S), process)
            assert batch.get("tokens", 0) == max(known, default=0)
