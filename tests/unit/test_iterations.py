"""Steps of ranks joined into iterations: processes that die, that never finish a step, jobs that are started again."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from small_recording import BEGIN_NS, S, make_identity, make_span, read_recording, write_table
from uneven_ranks import write_ranks
from zerotop.analysis.views import iterations
from zerotop.analysis.views.iterations import IterationTable
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.analysis.views.restarts import AttemptMember, group_attempts
from zerotop.recording.moments.process_exits import read_exits
from zerotop.recording.steps.step_dtype import STEP_DTYPE
from zerotop_probe.recording import tables
from zerotop_probe.recording.events import JobEnded, RankGone
from zerotop_probe.recording.tables import BOUNDARY
from zerotop_probe.recording.writer import EventWriter

FUTURE_NS = time.time_ns() + 10**6 * S


@dataclass
class Job:
    """A recording that is being written: rank processes that finish steps and are gone."""

    folder: Path
    begin_ns: int = BEGIN_NS
    open: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.events = EventWriter(str(self.folder), make_identity(-1))
        self.open.append(self.events)

    def start_process(self, rank: int, born: float, pid: int | None = None) -> Process:
        process = Process(self, rank, make_identity(rank, pid).pid, born)
        self.open.append(process.spans)
        return process

    def open_source(self) -> RecordingSource:
        return RecordingSource(read_recording(self.folder, begin_ns=self.begin_ns))

    def close(self) -> None:
        for writer in self.open:
            writer.close()


class Process:
    """A rank process; ``step`` is its next."""

    def __init__(self, job: Job, rank: int, pid: int, born: float) -> None:
        self.job, self.rank, self.pid, self.step = job, rank, pid, 0
        self.spans = write_table(
            job.folder, tables.SPANS, make_identity(rank, pid), make_span(born, born + 0.1, "init"), born=born
        )

    def finish_step(self, begin: float, end: float) -> None:
        self.spans.write(*make_span(begin, end, "step", self.step, BOUNDARY))
        self.step += 1

    def end_process(self, at: float) -> None:
        self.job.events.write(int(at * S), RankGone, rank=self.rank, pid=self.pid)


@pytest.fixture
def growing_job(tmp_path: Path) -> Any:
    made = Job(tmp_path, FUTURE_NS)
    yield made
    made.close()


def list_iterations(source: RecordingSource, at: float) -> list[tuple[int, float]]:
    iterations = source.view_at(source.begin_ns + int(at * S)).iterations
    return list(zip(iterations.step.tolist(), iterations.iteration_s.tolist(), strict=True))


def test_the_slowest_rank_counts(growing_job: Job) -> None:
    one, other = growing_job.start_process(0, 0), growing_job.start_process(1, 0)
    one.finish_step(1, 2)
    other.finish_step(1, 4)
    one.finish_step(2, 7)
    source = growing_job.open_source()
    assert list_iterations(source, 3) == []
    assert list_iterations(source, 4) == list_iterations(source, 9) == [(0, 3.0)]
    other.finish_step(4, 8)
    source.refresh()
    assert list_iterations(source, 8) == [(0, 3.0), (1, 5.0)]


def test_all_iterations_as_on_one_rank(growing_job: Job) -> None:
    one, other = growing_job.start_process(0, 0), growing_job.start_process(1, 0)
    for begin, ends in ((1, (2, 3)), (3, (5, 4))):
        for process, end in zip((one, other), ends, strict=True):
            process.finish_step(begin, end)
    again = growing_job.start_process(0, 10, pid=200)
    again.finish_step(11, 14)
    view = (source := growing_job.open_source()).view_at(source.begin_ns + 20 * S)
    assert view.iterations.iteration_s.tolist() == [2, 3, 3]  # each on the slowest rank
    assert source.iterations_on(0, view).iteration_s.tolist() == [1, 3, 3]
    on_other = source.iterations_on(1, view)
    assert on_other.iteration_s.tolist() == [2, 1, 3]  # after the restart there is no rank 1
    assert (on_other.rank, view.iterations.rank) == (1, None)
    assert source.iterations_on(1, view) is on_other
    again.finish_step(14, 16)
    source.refresh()
    assert source.iterations_on(1, source.view_at(source.begin_ns + 20 * S)).iteration_s.tolist() == [2, 1, 3, 2]
    assert source.iterations_on(1, view).iteration_s.tolist() == [2, 1, 3]


def test_a_process_without_steps_is_waited_for_while_it_lives(growing_job: Job) -> None:
    one, silent = growing_job.start_process(0, 0), growing_job.start_process(1, 0)
    one.finish_step(1, 2)
    source = growing_job.open_source()
    assert list_iterations(source, 5) == []
    silent.end_process(6)
    source.refresh()
    assert list_iterations(source, 5) == []
    assert list_iterations(source, 6) == [(0, 1.0)]
    one.finish_step(6, 8)
    source.refresh()
    assert list_iterations(source, 9) == [(0, 1.0), (1, 6.0)]


@pytest.mark.parametrize("ended", [True, False])
def test_a_process_without_steps_hides_nothing_after_the_end(tmp_path: Path, ended: bool) -> None:
    job = Job(tmp_path)
    job.start_process(1, 0)
    job.start_process(0, 0).finish_step(1, 2)
    if ended:
        job.events.write(3 * S, JobEnded, exit_code=1, text="")
    source = job.open_source()
    assert not source.is_live
    assert list_iterations(source, 3) == [(0, 1.0)]
    assert source.view_at(None).progress.finished_steps == 1
    job.close()


def test_a_job_started_again_from_a_checkpoint(growing_job: Job) -> None:
    first = [growing_job.start_process(rank, 0) for rank in (0, 1)]
    for step in range(3):
        first[0].finish_step(step + 1, step + 2)
    first[1].finish_step(1, 2)
    first[1].finish_step(2, 3)
    source = growing_job.open_source()
    assert [step for step, _ in list_iterations(source, 9)] == [0, 1]
    again = [growing_job.start_process(rank, 10, pid=200 + rank) for rank in (0, 1)]
    for process in again:
        process.step = 1
        process.finish_step(11, 12 + process.rank)
    source.refresh()
    assert [step for step, _ in list_iterations(source, 9.9)] == [0, 1]
    assert [step for step, _ in list_iterations(source, 10)] == [0, 1, 2]
    assert list_iterations(source, 13)[2:] == [(2, 1.0), (1, 2.0)]
    assert source.view_at(source.begin_ns + 13 * S).progress.finished_steps == 2


def test_a_smaller_job_after_a_restart(growing_job: Job) -> None:
    for rank in range(3):
        growing_job.start_process(rank, 0).finish_step(1, 2)
    again = [growing_job.start_process(rank, 10, pid=200 + rank) for rank in (0, 1)]
    for process in again:
        process.finish_step(11, 12)
        process.finish_step(12, 14)
    assert list_iterations(growing_job.open_source(), 20) == [(0, 1.0), (0, 1.0), (1, 2.0)]


@given(st.lists(st.tuples(st.sampled_from("sssssgn"), st.integers(0, 2)), max_size=40))
def test_nothing_shown_is_ever_taken_back(facts: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), FUTURE_NS)
        alive: dict[int, Process] = {}
        attempt: dict[int, Process] = {}
        source, seen = job.open_source(), []
        for second, (fact, rank) in enumerate(facts, 1):
            if fact == "n":
                attempt = {} if rank in attempt else attempt
                # Engines are made together: none comes late to a training that goes on.
                if not any(process.step for process in attempt.values()):
                    alive[rank] = attempt[rank] = job.start_process(rank, second, pid=1000 * second + rank)
            elif rank in alive and fact == "s":
                alive[rank].finish_step(second - 0.5, second)
            elif rank in alive:
                alive.pop(rank).end_process(second)
            source.refresh()
            seen.append((second, list_iterations(source, second)))
        again = job.open_source()
        job.close()
    for second, before in seen:
        assert list_iterations(again, second) == before


def test_ranks_that_were_entered_at_different_steps_are_joined_by_the_steps_number(growing_job: Job) -> None:
    one, late = growing_job.start_process(0, 0), growing_job.start_process(1, 3.2)
    one.step, late.step = 40, 42
    for step in range(4):
        one.finish_step(step + 1, step + 2)
    late.finish_step(3.3, 4.1)
    late.finish_step(4.1, 6.5)
    source = growing_job.open_source()
    assert [step for step, _ in list_iterations(source, 9)] == [40, 41, 42, 43]
    assert [round(seconds, 1) for _, seconds in list_iterations(source, 9)] == [1.0, 1.0, 1.0, 2.4]
    before = source.iterations_on(1, source.view_at(source.begin_ns + 9 * S)).iteration_s.tolist()
    assert [round(before[place], 1) for place in (0, 1, 3)] == [1.0, 1.0, 2.4]  # the other one's, before it was entered
    one.end_process(7)
    late.finish_step(6.5, 9)
    source.refresh()
    assert [step for step, _ in list_iterations(source, 9)] == [40, 41, 42, 43, 44]
    after = source.iterations_on(1, source.view_at(source.begin_ns + 9 * S)).iteration_s.tolist()
    assert after == [*before, pytest.approx(2.5)]


def test_steps_that_were_not_recorded_are_left_out(growing_job: Job) -> None:
    one, late = growing_job.start_process(0, 0), growing_job.start_process(1, 5)
    one.step, late.step = 40, 70
    one.finish_step(1, 2)
    one.end_process(3)
    late.finish_step(6, 7)
    assert [step for step, _ in list_iterations(growing_job.open_source(), 9)] == [40, 70]


@given(st.data())
def test_a_few_steps_of_many_ranks_are_joined_at_once_as_one_by_one(data: st.DataObject) -> None:
    ranks, count = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 4))
    members = []
    for rank in range(ranks):
        rows = np.zeros(count + 2, STEP_DTYPE)
        rows["rank"], rows["step"] = rank, np.arange(count + 2)
        for column, values in (
            ("iteration_s", st.sampled_from([np.nan, 0.0, 0.5, 1.0])),
            ("tokens", st.integers(-1, 3)),
            ("counted", st.booleans()),
            ("end_unix_ns", st.integers(0, 9)),
        ):
            rows[column] = data.draw(st.lists(values, min_size=count + 2, max_size=count + 2))
        members.append(AttemptMember(rows, None))
    tables = [IterationTable(), IterationTable()]
    with pytest.MonkeyPatch.context() as patch:
        for most, table in zip((64, 0), tables, strict=True):
            patch.setattr(iterations, "_FEW_STEPS", most)
            table.extend([members])
    assert tables[0].rows.tobytes() == tables[1].rows.tobytes()
    assert tables[0].token_counts.tolist() == tables[1].token_counts.tolist()
    assert tables[0].known_ns.tolist() == tables[1].known_ns.tolist()


def test_steps_of_each_process_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ended job of 8,192 ranks took minutes to open."""
    counted: list[AttemptMember] = []
    step_count = vars(AttemptMember)["step_count"]

    def note(member: AttemptMember) -> int:
        counted.append(member)
        return int(step_count.__get__(member))

    write_ranks(tmp_path, 40, 2, sampled=False)
    monkeypatch.setattr(AttemptMember, "step_count", property(note))
    recording = read_recording(tmp_path)
    steps = RecordingSource(recording).rank_steps
    counted.clear()
    (group,) = group_attempts(steps, read_exits(recording.at(2**62)), 2**62)
    assert len(counted) <= len(group) == 40
