"""Subnormal numbers in an optimizer's state: read without an operation of PyTorch, and told as the cause of long updates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from in_pieces import find_at_end
from small_recording import BEGIN_NS, S, make_identity, make_span, write_table
from zerotop.analysis.findings.pace import iteration_shift
from zerotop_probe.inside.changes.subnormal_state import holds_subnormal
from zerotop_probe.recording import events
from zerotop_probe.recording.event_values import SUBNORMAL
from zerotop_probe.recording.tables import BOUNDARY, SPANS
from zerotop_probe.recording.writer import EventWriter


def make_optimizer() -> torch.optim.Optimizer:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    return optimizer


def fill_rows(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set a quarter of each momentum to a value."""
    for state in optimizer.state.values():
        state["exp_avg"][: len(state["exp_avg"]) // 4] = value


@pytest.mark.parametrize(("value", "found"), [(1e-40, True), (-1e-40, True), (0.0, False), (1e-37, False), (1e4, False)])
def test_subnormal_values_are_found_in_samples(value: float, found: bool) -> None:
    optimizer = make_optimizer()
    assert not holds_subnormal([optimizer])
    fill_rows(optimizer, value)
    with torch.profiler.profile() as profile:
        assert holds_subnormal([optimizer]) is found
    assert not [one.name for one in profile.events() if one.name.startswith("aten::")]


def test_other_states_are_left_alone() -> None:
    """Tensors of other types, on no device, whose memory was given back, views with gaps, and states that are no dicts."""

    class Odd:
        @property
        def state(self) -> object:
            raise AssertionError("code of the job")

    empty, freed, odd = torch.nn.Parameter(torch.zeros(4)), torch.full((64,), 1e-40), torch.full((64, 64), 1e-40)
    freed.untyped_storage().resize_(0)
    states = [freed, odd.t()[:3], odd.double(), odd.to_sparse(), torch.empty(9, device="meta"), torch.tensor(1e-40), None]
    optimizer = torch.optim.SGD([empty])
    for number, value in enumerate(states):
        optimizer.state[torch.nn.Parameter(torch.zeros(number + 1))] = {"momentum_buffer": value}
    optimizer.state[empty] = "own"
    stateless = torch.optim.SGD([empty])
    stateless.state = None
    assert not holds_subnormal([optimizer, object(), Odd(), stateless])


@pytest.mark.parametrize(
    ("step_s", "forward_s", "held", "told"),
    [(0.06, 0.02, "True", True), (0.06, 0.02, "False", False), (0.06, 0.05, "True", False), (0.02, 0.06, "True", False)],
    ids=["longer updates", "none are held any more", "everything is longer", "only the forward is longer"],
)
def test_long_updates_are_put_down_to_them(tmp_path: Path, step_s: float, forward_s: float, held: str, told: bool) -> None:
    at, spans = 0.0, []
    for step in range(120):
        for phase, seconds in (("forward", forward_s if step >= 60 else 0.02), ("step", step_s if step >= 60 else 0.02)):
            spans.append(make_span(at, at + seconds, phase, step, BOUNDARY * (phase == "step")))
            at += seconds
    write_table(tmp_path, SPANS, make_identity(0), *spans).close()
    writer = EventWriter(str(tmp_path), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    changes = [{"name": SUBNORMAL, "before": "False", "after": "True"}]
    writer.write(int(1.5 * S), events.TrainingChanged, step=36, last_step=0, begin_ns=0, changes=changes)
    if held == "False":
        changes = [{"name": SUBNORMAL, "before": "True", "after": "False"}]
        writer.write(int(2 * S), events.TrainingChanged, step=50, last_step=36, begin_ns=int(1.5 * S), changes=changes)
    writer.close()
    (shift,) = find_at_end(tmp_path, [iteration_shift.detect])
    assert ("subnormal numbers" in shift.details, shift.fix == "torch.set_flush_denormal(True)") == (told, told)
