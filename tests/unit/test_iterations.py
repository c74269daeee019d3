"""Steps of ranks joined into iterations: processes that die, that never finish a step, jobs that are started again."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from small_recording import BEGIN_NS, S, identity, read, span, write
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop_probe.recording import tables
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
        self.events = EventWriter(str(self.folder), identity(-1))
        self.open.append(self.events)

    def process(self, rank: int, born: float, pid: int | None = None) -> Process:
        found = Process(self, rank, identity(rank, pid).pid, born)
        self.open.append(found.spans)
        return found

    def source(self) -> RecordingSource:
        return RecordingSource(read(self.folder, begin_ns=self.begin_ns))

    def close(self) -> None:
        for writer in self.open:
            writer.close()


class Process:
    """A rank process; ``step`` is its next."""

    def __init__(self, job: Job, rank: int, pid: int, born: float) -> None:
        self.job, self.rank, self.pid, self.step = job, rank, pid, 0
        self.spans = write(job.folder, tables.SPANS, identity(rank, pid), span(born, born + 0.1, "init"), born=born)

    def finish(self, begin: float, end: float) -> None:
        self.spans.write(*span(begin, end, "step", self.step, BOUNDARY))
        self.step += 1

    def gone(self, at: float) -> None:
        self.job.events.write(int(at * S), "rank_gone", rank=self.rank, pid=self.pid)


@pytest.fixture
def job(tmp_path: Path) -> Any:
    made = Job(tmp_path, FUTURE_NS)
    yield made
    made.close()


def shown(source: RecordingSource, at: float) -> list[tuple[int, float]]:
    iterations = source.view_at(source.begin_ns + int(at * S)).iterations
    return list(zip(iterations.step.tolist(), iterations.iteration_s.tolist(), strict=True))


def test_the_slowest_rank_counts(job: Job) -> None:
    one, other = job.process(0, 0), job.process(1, 0)
    one.finish(1, 2)
    other.finish(1, 4)
    one.finish(2, 7)
    source = job.source()
    assert shown(source, 3) == []
    assert shown(source, 4) == shown(source, 9) == [(0, 3.0)]
    other.finish(4, 8)
    source.refresh()
    assert shown(source, 8) == [(0, 3.0), (1, 5.0)]


def test_all_iterations_as_on_one_rank(job: Job) -> None:
    one, other = job.process(0, 0), job.process(1, 0)
    for begin, ends in ((1, (2, 3)), (3, (5, 4))):
        for process, end in zip((one, other), ends, strict=True):
            process.finish(begin, end)
    again = job.process(0, 10, pid=200)
    again.finish(11, 14)
    view = (source := job.source()).view_at(source.begin_ns + 20 * S)
    assert view.iterations.iteration_s.tolist() == [2, 3, 3]  # each on the slowest rank
    assert source.iterations_on(0, view).iteration_s.tolist() == [1, 3, 3]
    on_other = source.iterations_on(1, view)
    assert on_other.iteration_s.tolist() == [2, 1, 3]  # after the restart there is no rank 1
    assert (on_other.rank, view.iterations.rank) == (1, None)
    assert source.iterations_on(1, view) is on_other
    again.finish(14, 16)
    source.refresh()
    assert source.iterations_on(1, source.view_at(source.begin_ns + 20 * S)).iteration_s.tolist() == [2, 1, 3, 2]
    assert source.iterations_on(1, view).iteration_s.tolist() == [2, 1, 3]


def test_a_process_without_steps_is_waited_for_while_it_lives(job: Job) -> None:
    one, silent = job.process(0, 0), job.process(1, 0)
    one.finish(1, 2)
    source = job.source()
    assert shown(source, 5) == []
    silent.gone(6)
    source.refresh()
    assert shown(source, 5) == []
    assert shown(source, 6) == [(0, 1.0)]
    one.finish(6, 8)
    source.refresh()
    assert shown(source, 9) == [(0, 1.0), (1, 6.0)]


@pytest.mark.parametrize("ended", [True, False])
def test_a_process_without_steps_hides_nothing_after_the_end(tmp_path: Path, ended: bool) -> None:
    job = Job(tmp_path)
    job.process(1, 0)
    job.process(0, 0).finish(1, 2)
    if ended:
        job.events.write(3 * S, "job_ended", exit_code=1, text="")
    source = job.source()
    assert not source.is_live
    assert shown(source, 3) == [(0, 1.0)]
    assert source.view_at(None).progress.finished_steps == 1
    job.close()


def test_a_job_started_again_from_a_checkpoint(job: Job) -> None:
    first = [job.process(rank, 0) for rank in (0, 1)]
    for step in range(3):
        first[0].finish(step + 1, step + 2)
    first[1].finish(1, 2)
    first[1].finish(2, 3)
    source = job.source()
    assert [step for step, _ in shown(source, 9)] == [0, 1]
    again = [job.process(rank, 10, pid=200 + rank) for rank in (0, 1)]
    for process in again:
        process.step = 1
        process.finish(11, 12 + process.rank)
    source.refresh()
    assert [step for step, _ in shown(source, 9.9)] == [0, 1]
    assert [step for step, _ in shown(source, 10)] == [0, 1, 2]
    assert shown(source, 13)[2:] == [(2, 1.0), (1, 2.0)]
    assert source.view_at(source.begin_ns + 13 * S).progress.finished_steps == 2


def test_a_smaller_job_after_a_restart(job: Job) -> None:
    for rank in range(3):
        job.process(rank, 0).finish(1, 2)
    again = [job.process(rank, 10, pid=200 + rank) for rank in (0, 1)]
    for process in again:
        process.finish(11, 12)
        process.finish(12, 14)
    assert shown(job.source(), 20) == [(0, 1.0), (0, 1.0), (1, 2.0)]


@given(st.lists(st.tuples(st.sampled_from("sssssgn"), st.integers(0, 2)), max_size=40))
def test_nothing_shown_is_ever_taken_back(facts: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), FUTURE_NS)
        alive: dict[int, Process] = {}
        attempt: dict[int, Process] = {}
        source, seen = job.source(), []
        for second, (fact, rank) in enumerate(facts, 1):
            if fact == "n":
                attempt = {} if rank in attempt else attempt
                # Engines are made together: none comes late to a training that goes on.
                if not any(process.step for process in attempt.values()):
                    alive[rank] = attempt[rank] = job.process(rank, second, pid=1000 * second + rank)
            elif rank in alive and fact == "s":
                alive[rank].finish(second - 0.5, second)
            elif rank in alive:
                alive.pop(rank).gone(second)
            source.refresh()
            seen.append((second, shown(source, second)))
        again = job.source()
        job.close()
    for second, before in seen:
        assert shown(again, second) == before


def test_ranks_that_were_entered_at_different_steps_are_joined_by_the_steps_number(job: Job) -> None:
    one, late = job.process(0, 0), job.process(1, 3.2)
    one.step, late.step = 40, 42
    for step in range(4):
        one.finish(step + 1, step + 2)
    late.finish(3.3, 4.1)
    late.finish(4.1, 6.5)
    source = job.source()
    assert [step for step, _ in shown(source, 9)] == [40, 41, 42, 43]
    assert [round(seconds, 1) for _, seconds in shown(source, 9)] == [1.0, 1.0, 1.0, 2.4]
    before = source.iterations_on(1, source.view_at(source.begin_ns + 9 * S)).iteration_s.tolist()
    assert [round(before[place], 1) for place in (0, 1, 3)] == [1.0, 1.0, 2.4]  # the other one's, before it was entered
    one.gone(7)
    late.finish(6.5, 9)
    source.refresh()
    assert [step for step, _ in shown(source, 9)] == [40, 41, 42, 43, 44]
    after = source.iterations_on(1, source.view_at(source.begin_ns + 9 * S)).iteration_s.tolist()
    assert after == [*before, pytest.approx(2.5)]


def test_steps_that_were_not_recorded_are_left_out(job: Job) -> None:
    one, late = job.process(0, 0), job.process(1, 5)
    one.step, late.step = 40, 70
    one.finish(1, 2)
    one.gone(3)
    late.finish(6, 7)
    assert [step for step, _ in shown(job.source(), 9)] == [40, 70]
