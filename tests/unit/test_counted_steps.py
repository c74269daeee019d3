"""Counted steps: of most short steps only the end is recorded, and nothing that is unusual in them is missed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fake_streams import COMPUTING, FakeCuda
from rank_recordings import Rank
from zerotop_probe.inside.budget import DetailBudget
from zerotop_probe.inside.counting import StepCounting, make_counting
from zerotop_probe.inside.device import stream_waits
from zerotop_probe.inside.device.cuda_events import DeviceClock
from zerotop_probe.inside.device.gpu import RankDevice
from zerotop_probe.inside.device.microscope import StepMicroscope
from zerotop_probe.inside.device.stream_waits import StreamWaitCounter
from zerotop_probe.inside.guard import CostMeter, wrap_function
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.recording import directory, events
from zerotop_probe.recording.tables import BOUNDARY, COUNTED, PHASES, SKIPPED, UNKNOWN
from zerotop_probe.recording.writer import Identity

ME = Identity.for_this_process("rank", 0)
MS = 1_000_000


class Job:
    """A rank whose steps take 10 ms, and in detail more than the budget."""

    def __init__(self, recording: Path) -> None:
        self.recording = recording
        self.meter, self.counting = CostMeter(), StepCounting()
        self.recorder = Recorder(str(recording), ME, self.meter, self.counting)
        self.recorder.budget = DetailBudget(0.003)
        self.time_ns, self.step = 1_000_000_000, 0
        self.detail_cost_ns = 300_000

    def run_step(self, flags: int = 0, step_ms: float = 10) -> None:
        begin_ns = self.time_ns
        self.time_ns += int(step_ms * MS)
        if self.counting.is_on:
            self.meter.cost_ns += 20_000
            self.recorder.counted.end_step(self.time_ns - MS, self.time_ns, self.step, 0, flags)
        else:
            self.meter.cost_ns += self.detail_cost_ns
            if not self.counting.was_on:
                forward = self.recorder.begin_span(begin_ns + MS, "forward", (0, self.step, 0))
                self.recorder.end_span(forward, begin_ns + 2 * MS)
            span = self.recorder.begin_span(self.time_ns - MS, "step", (0, self.step, 0))
            self.recorder.end_span(span, self.time_ns, flags | BOUNDARY)
            self.recorder.end_step(span, self.time_ns, can_count=True)
        self.step += 1

    def run_until_counted(self) -> None:
        while not self.counting.is_on or self.counting.uncounted_step - self.step < 3:
            self.run_step()

    def read_spans(self) -> Any:
        return Rank(self.recording, 0).spans

    def read_steps(self) -> Any:
        spans = self.read_spans()
        return spans[spans["flags"] & BOUNDARY != 0]


@pytest.fixture
def running_job(tmp_path: Path) -> Iterator[Job]:
    path = directory.create_recording(["python", "train.py"], path=str(tmp_path / "recording"))
    started = Job(Path(path))
    yield started
    started.recorder.close()


def test_every_step_has_its_number_and_its_end(running_job: Job) -> None:
    for _ in range(200):
        running_job.run_step()
    steps = running_job.read_steps()
    assert steps["step"].tolist() == list(range(200))
    assert steps["end_ns"].tolist() == [1_000_000_000 + (step + 1) * 10 * MS for step in range(200)]
    counted = steps["flags"] & COUNTED != 0
    assert not counted[:20].any()
    assert 0.85 < counted[30:].mean() < 1
    assert set(steps["micro_step"][counted]) == {UNKNOWN}
    forwards = running_job.read_spans()
    forwards = forwards[forwards["phase"] == PHASES.index("forward")]
    assert forwards["step"].tolist() == steps["step"][~counted].tolist()


def test_a_skipped_update_is_seen(running_job: Job) -> None:
    running_job.run_until_counted()
    running_job.run_step(SKIPPED)
    last = running_job.read_steps()[-1]
    assert last["flags"] == BOUNDARY | COUNTED | SKIPPED


@pytest.mark.parametrize("phase", ["eval", "checkpoint_save", "generate"])
def test_phases_outside_training_are_recorded_and_their_step_is_counted(running_job: Job, phase: str) -> None:
    running_job.run_until_counted()
    span = running_job.recorder.begin_span(running_job.time_ns + MS, phase, (0, running_job.step, 0))
    assert not running_job.counting.is_on
    running_job.recorder.end_span(span, running_job.time_ns + 2 * MS)
    running_job.run_step()
    recorded = running_job.read_spans()[-2:]
    assert [PHASES[row["phase"]] for row in recorded] == [phase, "step"]
    assert recorded["flags"].tolist() == [0, BOUNDARY | COUNTED]
    running_job.run_step()
    assert not running_job.read_steps()[-1]["flags"] & COUNTED or phase == "generate"


def test_after_a_step_unlike_the_others_it_is_decided_anew(running_job: Job) -> None:
    running_job.run_until_counted()
    asked: list[int] = []
    decide: Callable[..., None] = running_job.recorder.budget.end_step

    def note_step(*args: Any, **kwargs: Any) -> None:
        asked.append(running_job.step)
        decide(*args, **kwargs)

    running_job.recorder.budget.end_step = note_step  # type: ignore[method-assign]
    running_job.run_step()
    assert not asked
    running_job.run_step(step_ms=40)
    assert asked == [running_job.step - 1]


def test_steps_in_which_waits_of_streams_are_measured_have_phases(
    running_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    monkeypatch.setattr(stream_waits, "now", lambda: running_job.time_ns)
    cuda, recorder, meter = FakeCuda(), running_job.recorder, running_job.meter
    waits = StreamWaitCounter(cuda, 1, recorder.write_event, meter)
    microscope = StepMicroscope(str(tmp_path), ME, 1, None, recorder.write_event, meter)
    clock = DeviceClock(recorder.files, 1, cuda, meter, None)
    recorder.device = RankDevice(None, clock, microscope, None, waits)
    measured = []
    running_job.detail_cost_ns = 1_500_000
    while running_job.step < 600:  # 36 seconds
        if waits.is_looking:
            measured.append(running_job.step)
        cuda.Stream(COMPUTING).wait_event(3 * MS)
        running_job.run_step(step_ms=60)
    assert measured == [*range(256, 260), *range(512, 516)]  # multiples of a power of two
    steps = running_job.read_steps()
    counted = steps["flags"][np.isin(steps["step"], measured)] & COUNTED
    assert not counted.any()
    assert (steps["flags"] & COUNTED != 0).mean() > 0.8
    assert [one["waited_ns"] for one in Rank(tmp_path / "recording", 0).find_events(events.StreamWaits.event_name)] == [
        [3 * MS] * 4
    ] * 2


def test_a_failed_call_is_recorded_although_its_begin_is_unknown() -> None:
    counting, ended = StepCounting(), []

    def raise_error(subject: object, error: Exception) -> None:
        raise error

    def note_end(token: Any, time_ns: int, flags: int, result: Any) -> None:
        ended.append((token, flags))

    wrapped = wrap_function(raise_error, "forward", lambda *_: "token", note_end, CostMeter(), counting)
    counting.is_on = True
    with pytest.raises(StopIteration):
        wrapped(None, StopIteration())
    assert counting.is_on
    assert not ended
    with pytest.raises(KeyError):
        wrapped(None, KeyError())
    assert not counting.is_on
    assert ended == [("token", 8)]


@pytest.mark.parametrize("make", [StepCounting, make_counting], ids=["in Python", "in C"])
def test_a_forward_that_checkpointing_stops_has_not_failed(make: Callable[[], StepCounting]) -> None:
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("torch.utils.checkpoint")
    counting, ended = make(), []

    first, last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def layer(value: Any) -> Any:
        return last(first(value).relu()) + 1  # the addition is not computed again

    ends: list[BaseException] = []

    def call(subject: Any, value: Any) -> Any:
        try:
            return layer(value)
        except BaseException as error:
            ends.append(error)
            raise

    wrapped = wrap_function(call, "forward", lambda *_: "token", lambda *end: ended.append(end), CostMeter(), counting)
    counting.is_on = True
    value = torch.ones(2, 4, requires_grad=True)
    checkpoint.checkpoint(partial(wrapped, None), value, use_reentrant=False).sum().backward()
    assert value.grad is not None
    assert len(ends) == 1
    assert counting.is_on
    assert not ended
