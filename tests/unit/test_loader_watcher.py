"""When py-spy is asked what DataLoader workers do, and how often."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from small_recording import make_record
from zerotop_probe.outside import procfs
from zerotop_probe.outside.procfs import ProcessStat
from zerotop_probe.outside.sampling.stuck import loader_watcher, py_spy
from zerotop_probe.outside.sampling.stuck.data_waits import DataWaits
from zerotop_probe.outside.sampling.stuck.loader_watcher import LoaderWatcher, Waiting
from zerotop_probe.recording.events import LoaderStacks
from zerotop_probe.recording.tables import BOUNDARY, COUNTED, PHASE_CODE, PROBE, SPANS

MS = 1_000_000


def pack_span(phase: str, begin_ns: int, end_ns: int, flags: int = 0) -> bytes:
    """Return a record of an outermost phase."""
    fields = {"begin_ns": begin_ns, "end_ns": end_ns, "phase": PHASE_CODE[phase], "depth": 0, "flags": flags, "engine": 0}
    return SPANS.record_struct.pack(*make_record(SPANS, **fields))


def make_waits(waited_ms: int, trained_ms: int, count: int, *, ago_s: float = 0.0, phase: str = "data") -> DataWaits:
    """Return what is known of a rank that loads data and trains in turn, and did so last some seconds ago."""
    waits, end_ns = DataWaits(), time.monotonic_ns() - int(ago_s * 1e9)
    for number in range(count, 0, -1):
        begin_ns = end_ns - number * (waited_ms + trained_ms) * MS
        middle_ns = begin_ns + waited_ms * MS
        parts = ((phase, begin_ns, middle_ns), ("forward", middle_ns, middle_ns + trained_ms * MS))
        spans = [pack_span(*part) for part in parts]
        waits.add_records(SPANS.name, spans)
    return waits


@pytest.mark.parametrize(
    ("times", "more", "is_waiting"),
    [
        ((100, 100, 10), {}, True),
        ((100, 1000, 10), {}, False),
        ((5, 5, 10), {}, False),
        ((1000, 10, 6), {}, False),
        ((100, 100, 10), {"ago_s": 60.0}, False),
        ((100, 100, 10), {"phase": "eval"}, False),
    ],
    ids=["a stall", "a small share", "hardly any time", "too few", "over", "another phase"],
)
def test_a_rank_waits_while_its_last_iterations_did(
    times: tuple[int, int, int], more: dict[str, Any], is_waiting: bool
) -> None:
    assert make_waits(*times, **more).is_waiting() is is_waiting


def test_the_first_wait_of_an_epoch_does_not_count() -> None:
    waits = make_waits(1, 100, 6, ago_s=5.0)
    waits.add_records(SPANS.name, [pack_span("data", time.monotonic_ns() - 4000 * MS, time.monotonic_ns())])
    assert not waits.is_waiting()


def test_records_of_other_tables_are_left_out() -> None:
    DataWaits().add_records(PROBE.name, [b"short"])


@pytest.mark.parametrize(
    ("times_ms", "has_pauses"),
    [
        (([8, 8, 8, 400] * 4), True),
        (([200] * 8 + [260] * 8), False),  # slower for good
        (([8] * 15 + [9_000]), False),  # once
        (([8, 8, 8, 15] * 4), False),
        (([8, 8, 8, 400] * 2), False),  # too few
    ],
)
def test_pauses_show_in_steps_that_are_only_counted(times_ms: list[int], has_pauses: bool) -> None:
    waits, at_ns = DataWaits(), time.monotonic_ns() - 12_000 * MS
    for taken_ms in times_ms:
        at_ns += taken_ms * MS
        waits.add_records(SPANS.name, [pack_span("step", at_ns - MS, at_ns, BOUNDARY | COUNTED)])
    assert waits.has_pauses() is has_pauses


@pytest.mark.parametrize(("state", "count"), [("R", 3), ("D", 3), ("S", 0)])
def test_workers_are_read_during_pauses_if_they_run(state: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = FakePySpy(monkeypatch)
    stat = ProcessStat(b"pt_data_worker", state, 5, 5, 0, 0, 0, 0)
    monkeypatch.setattr(procfs, "read_stat", lambda pid: stat)
    spy.watch([Waiting(0, 5, False, True)], 10)
    assert len(spy.written) == count


class FakePySpy:
    """Takes the place of py-spy and of the workers, and notes what it is asked."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, is_allowed: bool = True, idle: Sequence[int] = (), workers: int = 5
    ) -> None:
        """``idle``: the numbers of workers that load no batch."""
        self.asked: list[int] = []
        self.written: list[tuple[int, int, int]] = []
        self.now_s = 1000.0
        self._is_allowed, self._idle = is_allowed, idle
        monkeypatch.setattr(py_spy, "find_program", lambda: "py-spy")
        monkeypatch.setattr(py_spy, "dump_stacks", self._dump)
        monkeypatch.setattr(loader_watcher, "list_workers", lambda pid: [10 * pid + number for number in range(workers)])
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def _dump(self, program: str, pid: int) -> dict[str, Any] | None:
        self.asked.append(pid)
        frames = [] if pid % 10 in self._idle else [{"file": "torch/utils/data/_utils/fetch.py"}]
        return {"frames": frames, "stacks": [{"count": 1}, {"count": 1, "thread": "other"}]} if self._is_allowed else None

    def note(self, time_ns: int, kind: type[LoaderStacks], **facts: Any) -> None:
        self.written.append((facts["rank"], facts["worker"], len(facts["stacks"])))

    def watch(self, waiting: list[Waiting], seconds: int, *later: tuple[list[Waiting], int]) -> None:
        """``later``: what waits then, and for how long."""
        looks = [one for now, lasts in ((waiting, seconds), *later) for one in [now] * lasts]
        watcher = LoaderWatcher(lambda: looks.pop(0), self.note)
        while looks:
            watcher._check_ranks("py-spy")
            self.now_s += 1.0


def test_a_few_workers_are_read_once_a_minute_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = FakePySpy(monkeypatch)
    spy.watch([Waiting(0, 5, True), Waiting(1, 6, True), Waiting(2, 7, False)], 100)
    assert spy.written == [(0, 50, 1), (0, 51, 1), (0, 52, 1), (1, 60, 1), (1, 61, 1), (1, 62, 1)]


def test_pauses_between_looks_become_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = FakePySpy(monkeypatch)
    spy.watch([Waiting(0, 5, True)], 3600)
    assert len(spy.asked) == 3 * 7  # after 1, 61, 181, 421, 901, 1861 and 2821 s


@pytest.mark.parametrize(("workers", "idle"), [(5, (0, 1, 2, 4)), (2, (0,)), (8, (0, 2, 3, 4, 6, 7)), (9, range(7))])
def test_where_some_workers_are_idle_all_are_read_twice_more(
    monkeypatch: pytest.MonkeyPatch, workers: int, idle: Sequence[int]
) -> None:
    spy = FakePySpy(monkeypatch, idle=idle, workers=workers)
    spy.watch([Waiting(0, 5, True), Waiting(1, 6, False)], 59)
    assert spy.asked == [50 + number for number in range(min(workers, 8))] * 3


def test_workers_that_are_all_idle_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank waits for a worker that was not read, or for something else."""
    spy = FakePySpy(monkeypatch, idle=range(5))
    spy.watch([Waiting(0, 5, True)], 59)
    assert len(spy.asked) == 5


def test_a_rank_of_which_only_some_steps_wait_does_wait() -> None:
    """As when batches come in order, and one worker of eight is slow."""
    waits, at_ns = DataWaits(), time.monotonic_ns() - 15_000 * MS
    looks = []
    for number in range(32):
        waited_ns = (500 if number % 8 == 7 else 1) * MS
        waits.add_records(SPANS.name, [pack_span("data", at_ns, at_ns + waited_ns)])
        at_ns += waited_ns + MS
        looks.append(waits.is_waiting())
    assert all(looks[24:])


def test_a_passing_wait_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = FakePySpy(monkeypatch)
    spy.watch([Waiting(0, 5, True)], 1)
    spy.watch([Waiting(0, 5, False)], 10)
    assert spy.asked == []


def test_where_it_is_not_allowed_one_worker_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = FakePySpy(monkeypatch, is_allowed=False)
    spy.watch([Waiting(0, 5, True)], 59)
    assert (spy.asked, spy.written) == ([50], [])


@pytest.mark.parametrize(
    ("times", "ago_s", "is_silent"),
    [((10, 100, 10), 6.0, True), ((10, 100, 10), 4.0, False), ((10, 2000, 10), 9.0, False), ((10, 100, 1), 60.0, False)],
)
def test_a_rank_is_silent_after_many_of_its_iterations(times: tuple[int, int, int], ago_s: float, is_silent: bool) -> None:
    waits, end_ns = DataWaits(), time.monotonic_ns() - int(ago_s * 1e9)
    waited_ms, trained_ms, count = times
    for number in range(count, 0, -1):
        begin_ns = end_ns - number * (waited_ms + trained_ms) * MS
        step_ns = begin_ns + (waited_ms + trained_ms) * MS
        waits.add_records(SPANS.name, [pack_span("step", begin_ns, step_ns, BOUNDARY | COUNTED)])
    assert waits.is_silent() is is_silent


def test_workers_of_silent_ranks_are_read_once_in_each_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = FakePySpy(monkeypatch, workers=2)
    ranks = [Waiting(rank, 5 + rank, False, is_silent=True) for rank in (0, 1)]
    spy.watch(ranks, 200, ([], 3), (ranks, 5))
    both = [(0, 50, 1), (0, 51, 1), (1, 60, 1), (1, 61, 1)]
    assert spy.written == both * 2


def test_a_silence_does_not_wait_for_the_next_look_at_slow_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = FakePySpy(monkeypatch, workers=1)
    spy.watch([Waiting(0, 5, True)], 5, ([Waiting(0, 5, False, is_silent=True)], 5))
    assert spy.written == [(0, 50, 1)] * 2
