"""DDP's no_sync() that begins after the forward: what the probe sees of a real DDP, and what is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from memory_recording import record_two_steps
from small_recording import BEGIN_NS, S, make_identity, make_span
from zerotop.analysis.findings import detect_findings
from zerotop_probe.inside.changes.setting_lines import SettingLines
from zerotop_probe.inside.changes.training_watch import TrainingWatch
from zerotop_probe.inside.guard import CostMeter
from zerotop_probe.recording import events, tables

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")


@pytest.fixture
def ddp() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield make_ddp()
    finally:
        dist.destroy_process_group()


def make_ddp() -> Any:
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))


class _Job:
    """A loop whose forwards and backwards the watch is told of, as the hooks do it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.watch = TrainingWatch(CostMeter(), SettingLines(CostMeter()))
        self.watch.begin_recording(self._keep_event, names_lines=False)
        self.step = 0

    def _keep_event(self, time_ns: int, event: type[events.Event], **facts: Any) -> None:
        self.events.append((event.__name__, facts))

    def forward(self, model: Any) -> Any:
        self.watch.note_training(model, is_first=True)
        return model(torch.ones(3, 4)).sum()

    def backward(self, loss: Any) -> None:
        self.watch.note_backward()
        loss.backward()

    def end_step(self) -> None:
        self.watch.end_step(10**12 + self.step * 10**9, self.step)
        self.step += 1


def accumulate(job: _Job, ddp: Any, micro_steps: int) -> None:
    for left in range(micro_steps, 0, -1):
        loss = job.forward(ddp)
        with ddp.no_sync() if left > 1 else nullcontext():
            job.backward(loss)


@pytest.mark.parametrize("micro_steps", [2, 6])
def test_a_no_sync_around_the_backward_alone_is_found_once(ddp: Any, micro_steps: int) -> None:
    reduced: list[int] = []

    def note_reduction(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with classes
        reduced.append(1)
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, note_reduction)
    job = _Job()
    for _ in range(8):
        accumulate(job, ddp, micro_steps)
        job.end_step()
    assert len(reduced) == 8 * micro_steps
    assert job.events == [("LateNoSync", {"step": 2, "micro_steps": micro_steps})]


def _wrap_both(job: _Job, ddp: Any) -> None:
    for left in (1, 0):
        with ddp.no_sync() if left else nullcontext():
            job.backward(job.forward(ddp))


def _wrap_forward_alone(job: _Job, ddp: Any) -> None:
    with ddp.no_sync():
        loss = job.forward(ddp)
    job.backward(loss)
    job.backward(job.forward(ddp))


def _wrap_all_backwards(job: _Job, ddp: Any) -> None:
    for _ in range(3):
        loss = job.forward(ddp)
        with ddp.no_sync():
            job.backward(loss)


def _evaluate_before(job: _Job, ddp: Any) -> None:
    """As for a batch norm's statistics: a forward in training mode without gradients."""
    with torch.no_grad():
        job.forward(ddp)
    with ddp.no_sync():
        job.backward(ddp.module(torch.ones(3, 4)).sum())
    job.backward(job.forward(ddp))


def _train_two_models(job: _Job, ddp: Any) -> None:
    """As a generator's update through its critic: whose gradients are to be reduced is not known."""
    loss = job.forward(ddp) + job.forward(make_ddp())
    with ddp.no_sync():
        job.backward(loss)
    job.backward(job.forward(ddp))


def _vary_micro_steps(job: _Job, ddp: Any) -> None:
    accumulate(job, ddp, 2 + job.step % 2)


def _reduce_in_python(job: _Job, ddp: Any) -> None:
    """The reducer in Python reads it in the backward."""
    vars(ddp)["_use_python_reducer"] = True
    job.watch.note_training(ddp, is_first=True)
    with ddp.no_sync():
        job.watch.note_backward()
    job.watch.note_training(ddp, is_first=True)
    job.watch.note_backward()


@pytest.mark.parametrize(
    "train",
    [
        _wrap_both,
        _wrap_forward_alone,
        _wrap_all_backwards,
        _evaluate_before,
        _train_two_models,
        _vary_micro_steps,
        _reduce_in_python,
        lambda job, ddp: accumulate(job, ddp, 1),
        lambda job, ddp: accumulate(job, ddp.module, 1),
    ],
)
def test_other_steps_are_no_mistake(ddp: Any, train: Callable[[_Job, Any], None]) -> None:
    job = _Job()
    for _ in range(8):
        train(job, ddp)
        job.end_step()
    assert not job.events


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_told_with_its_line_where_there_are_several_ranks(ranks: int, tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    if ranks == 2:
        recording.write_engine(1)
        recording.write_records(tables.SPANS, make_identity(1), [make_span(10, 14, "forward", 0, tables.BOUNDARY)])
    place = {"file": "train.py", "line": 49, "function": "Trainer.context"}
    recording.write_event(make_identity(0), 31, events.LateNoSync, step=3, micro_steps=6, **place)
    found = [one for one in detect_findings(recording.open_recording(), BEGIN_NS + 40 * S) if one.name == "late_no_sync"]
    assert len(found) == ranks - 1
    for one in found:
        assert one.headline == "no_sync() has no effect: it begins after the forward: train.py:49"
        assert "after each of the 6 micro-steps of a step instead of once" in one.details
        assert (one.step, one.severity) == (3, "warning")
