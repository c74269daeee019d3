"""How long a stream waits for others: which steps are measured, what is recorded of them, and that the job never notices."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from declared_events import check_event
from fake_streams import COMPUTING, MS, FakeCuda, FakeEvent
from zerotop_probe.inside.device import stream_waits
from zerotop_probe.inside.device.stream_waits import StreamWaitCounter
from zerotop_probe.inside.guard import CostMeter
from zerotop_probe.recording import events

S, GATHERING = 1_000_000_000, 9


class Rank:
    """A rank whose steps take a second, in each of which its stream waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, ranks: int = 2) -> None:
        self.cuda = FakeCuda()
        self.original = self.cuda.Stream.wait_event
        self.meter = CostMeter()
        self.errors: list[BaseException] = []
        self.meter.report_error = lambda where, error: self.errors.append(error)
        self.written: list[dict[str, Any]] = []
        self.time_ns = 0
        monkeypatch.setattr(stream_waits, "now", lambda: self.time_ns)
        distributed = SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: ranks)
        monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
        self.waits = StreamWaitCounter(self.cuda, 1, self.write, self.meter)
        self.step = 0

    def write(self, time_ns: int, event: type[events.Event], **facts: Any) -> None:
        check_event({"time_ns": time_ns, "event": event.event_name, **facts})
        assert event == events.StreamWaits
        self.written.append(facts)

    def train(self, steps: int, *, waits_ns: tuple[int, ...] = (3 * MS, 5 * MS), seconds: float = 1.0) -> list[int]:
        """Return the steps that were measured."""
        measured = []
        for _ in range(steps):
            if self.waits.is_looking:
                measured.append(self.step)
            self.cuda.Stream(GATHERING).wait_event(100 * MS)
            for wait_ns in waits_ns:
                self.cuda.Stream(COMPUTING).wait_event(wait_ns)
            self.time_ns += round(seconds * S)
            self.waits.end_step(self.step)
            self.step += 1
        return measured


def test_few_steps_are_measured_and_the_waits_of_the_computing_stream_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    measured = rank.train(70)
    assert measured == [*range(16, 20), *range(32, 36), *range(48, 52), *range(64, 68)]  # 16 steps of a second, on all ranks
    assert [one["first_step"] for one in rank.written] == [16, 32, 48, 64]
    assert all(one["waited_ns"] == [8 * MS] * 4 for one in rank.written)
    assert all((one["waits"], one["starved"]) == ([2] * 4, [0] * 4) for one in rank.written)
    assert len(rank.cuda.waited) == 3 * 70
    assert rank.cuda.Stream.wait_event is rank.original
    assert not rank.errors


def test_ranks_of_different_pace_share_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Rank(monkeypatch).train(40, seconds=0.9)[:5] == [32, 33, 34, 35]
    assert Rank(monkeypatch).train(40, seconds=1.0)[4:8] == [32, 33, 34, 35]


def test_long_steps_are_measured_each_8_steps_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Rank(monkeypatch).train(20, seconds=60.0) == [*range(8, 12), *range(16, 20)]


def test_where_measuring_costs_much_it_is_done_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    record = FakeEvent.record

    def record_slowly(event: FakeEvent, stream: Any) -> None:
        rank.time_ns += 2 * MS
        record(event, stream)

    monkeypatch.setattr(FakeEvent, "record", record_slowly)
    # A step costs 8 ms, four 32: they may take 0.03 % of the time between two looks, 107 s.
    assert rank.train(300)[::4] == [16, 128, 256]
    assert rank.meter.cost_ns == 3 * 32 * MS
    monkeypatch.setenv("PYTHONZEROTOP_BUDGET", "0")
    assert rank.train(300) == []


def test_how_often_the_gpu_was_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.cuda.is_starved = True
    rank.train(30)
    assert rank.written[0]["starved"] == [2] * 4


@pytest.mark.parametrize("ranks", [1])
def test_a_single_rank_waits_for_nobody(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    assert Rank(monkeypatch, ranks=ranks).train(100) == []


def test_nothing_is_recorded_into_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.cuda.is_capturing = True
    rank.train(40)
    assert not rank.written
    assert not rank.errors


def test_a_gpu_that_is_late_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.cuda.is_behind = True
    rank.train(25)
    assert not rank.written
    rank.cuda.is_behind = False
    rank.train(1)
    assert [one["first_step"] for one in rank.written] == [16]
    rank.cuda.is_behind = True
    assert rank.train(40)[:5] == [32, 33, 34, 35, 64]  # what was never finished is forgotten
    assert len(rank.written) == 1


def test_steps_that_are_not_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.train(18)
    assert rank.waits.is_looking
    rank.step = 40  # steps were counted meanwhile
    rank.train(1)
    assert not rank.waits.is_looking
    assert rank.cuda.Stream.wait_event is rank.original
    rank.train(5)
    assert not rank.written


def test_the_jobs_own_errors_and_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.train(17)
    with pytest.raises(ValueError, match="of the job"):
        rank.cuda.Stream(COMPUTING).wait_event(ValueError("of the job"))
    monkeypatch.setattr(FakeEvent, "record", lambda event, stream: 1 / 0)
    before = len(rank.cuda.waited)
    rank.train(20)
    assert len(rank.cuda.waited) == before + 3 * 20
    assert [type(error) for error in rank.errors] == [ZeroDivisionError]
    assert not rank.written


def test_ends_of_counted_steps_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.train(10)
    assert rank.waits.find_look(10) == 16
    rank.step, rank.time_ns = 15, rank.time_ns + 5 * S
    assert rank.train(5) == [16, 17, 18, 19]
    assert rank.waits.find_look(20) == 32
    rank.step, rank.time_ns = 30, rank.time_ns + 10 * S
    rank.train(1)  # the look is read late
    assert [one["first_step"] for one in rank.written] == [16]
    assert rank.train(4) == [32, 33, 34]


def test_a_pause_or_an_irregular_step_changes_little(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.train(30, seconds=0.3)
    rank.train(1, seconds=0.01)
    rank.train(1, seconds=0.59)
    assert rank.waits.find_look(1) == 64


def test_somebody_else_replaces_the_method_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.train(17)
    ours: Any = rank.cuda.Stream.wait_event
    theirs: list[Any] = []

    def wait_event(stream: Any, event: Any) -> None:
        theirs.append(event)
        ours(stream, event)

    monkeypatch.setattr(rank.cuda.Stream, "wait_event", wait_event)
    rank.train(10)
    assert len(theirs) == 30
    assert not rank.waits.is_looking
    assert [one["waited_ns"] for one in rank.written] == [[8 * MS] * 4]


def test_it_stops_when_the_probe_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.train(17)
    rank.waits.stop()
    assert rank.cuda.Stream.wait_event is rank.original


def test_the_stream_of_the_installed_pytorch_can_be_replaced() -> None:
    """What is replaced is there, and wait_stream calls it."""
    import torch

    assert "wait_event" in vars(torch.cuda.Stream)
    assert "wait_event" in torch.cuda.Stream.wait_stream.__code__.co_names
