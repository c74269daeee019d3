"""Updates that a fused optimizer skips on the GPU: how many, from readings of the loss scale that nobody waits for."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from zerotop_probe.inside.guard import CostMeter
from zerotop_probe.inside.hooks.loops.loss_scale import (
    DeviceCopy,
    LossScale,
    ScaleRule,
    ScaleState,
    ScaleWatch,
    count_skipped,
)

torch = pytest.importorskip("torch")

_USUAL = ScaleRule(0.5, 2.0, 2000)
_EACH = ScaleRule(0.5, 2.0, 1)  # the scale doubles with each update that is not skipped
_S = 1_000_000_000


def _follow(state: ScaleState, skipped: list[bool], rule: ScaleRule) -> ScaleState:
    """Update a scale with PyTorch's own kernel."""
    scale, streak = torch.tensor(state.scale), torch.tensor(state.streak, dtype=torch.int32)
    for was_skipped in skipped:
        found = torch.tensor(float(was_skipped))
        torch._amp_update_scale_(scale, streak, found, rule.growth_factor, rule.backoff_factor, rule.growth_interval)
    return ScaleState(scale.item(), streak.item())


@pytest.mark.parametrize("rule", [_USUAL, ScaleRule(0.5, 2.0, 7), ScaleRule(0.25, 2.0, 5), ScaleRule(0.7, 1.5, 20), _EACH])
def test_no_more_updates_are_counted_than_were_skipped(rule: ScaleRule) -> None:
    chance = random.Random(1)
    exact = 0
    for _ in range(300):
        share = chance.choice([0.0, 0.02, 0.2, 0.8, 1.0])
        skipped = [chance.random() < share for _ in range(chance.randint(1, 60))]
        before = ScaleState(65536.0, chance.randrange(rule.growth_interval))
        found = count_skipped(before, _follow(before, skipped, rule), len(skipped), rule)
        assert found is not None
        assert found <= sum(skipped)
        assert bool(found) is any(skipped)
        exact += found == sum(skipped)
    assert exact == 300 if rule in (_USUAL, _EACH) else exact > 150


def test_the_count_of_a_scale_that_falls_to_0_is_a_lower_bound() -> None:
    before = ScaleState(4096.0, 3)
    assert count_skipped(before, _follow(before, [True] * 150, _USUAL), 150, _USUAL) == 150
    assert count_skipped(before, _follow(before, [True] * 400, _USUAL), 400, _USUAL) == 152
    assert count_skipped(ScaleState(0.0, 0), ScaleState(0.0, 0), 90, _USUAL) == 1
    assert count_skipped(ScaleState(0.0, 0), ScaleState(0.0, 90), 90, _USUAL) == 0


@pytest.mark.parametrize(
    "after",
    [
        ScaleState(1024.0, 110),  # set by hand: no update was skipped
        ScaleState(65536.0, 0),  # the same
        ScaleState(40000.0, 5),
        ScaleState(2.0**10, 97),  # six skipped and 97 not are more than a hundred
        ScaleState(float("inf"), 5),
    ],
)
def test_a_scale_that_the_rule_does_not_explain_tells_nothing(after: ScaleState) -> None:
    assert count_skipped(ScaleState(65536.0, 10), after, 100, _USUAL) is None


class _Event:
    """A CUDA event whose work is finished when the test says so."""

    is_done = False

    def record(self, stream: object) -> None:
        type(self).is_done = False

    def query(self) -> bool:
        return type(self).is_done


class _Cuda:
    Event = _Event
    is_capturing = False

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def current_stream(self, device: object) -> None:
        return None


class _Device:
    type = "cuda"


class _OnGpu:
    """A tensor on a GPU that the machine need not have."""

    device, dtype = _Device(), torch.float32

    def __init__(self, value: float) -> None:
        self.value = value


class _Copy:
    def copy_(self, tensor: _OnGpu, *, non_blocking: bool) -> None:
        assert non_blocking
        self.value = tensor.value

    def item(self) -> float:
        return self.value


class _Torch:
    def __init__(self) -> None:
        self.cuda = _Cuda()

    def empty(self, shape: object, *, dtype: object, device: str, pin_memory: bool) -> _Copy:
        assert (device, pin_memory) == ("cpu", True)
        return _Copy()


class _Scaler:
    """A scaler on that GPU."""

    _init_scale, _init_growth_tracker = 4096.0, 0

    def __init__(self) -> None:
        self.set_state(4096.0, 0)

    def get_backoff_factor(self) -> float:
        return 0.5

    def get_growth_factor(self) -> float:
        return 2.0

    def get_growth_interval(self) -> int:
        return 2000

    def set_state(self, scale: float, streak: int, make: Callable[[float], Any] = _OnGpu) -> None:
        self._scale, self._growth_tracker = make(scale), make(streak)


def _run(watch: ScaleWatch, scaler: Any, steps: range) -> list[dict[str, Any]]:
    """Make four updates a second, the step's number being the quarter."""
    found = [watch.follow_update(step * _S // 4 + 1, scaler, step) for step in steps]
    return [facts for facts in found if facts is not None]


def test_a_reading_is_used_when_the_gpu_has_finished_it() -> None:
    scaler, torch_ = _Scaler(), _Torch()
    watch = ScaleWatch(torch_, CostMeter(), ScaleState(4096.0, 0))
    scaler.set_state(1024.0, 3)
    assert not _run(watch, scaler, range(8))  # the reading of step 4 is not finished
    scaler.set_state(1.0, 1)
    _Event.is_done = True
    (facts,) = _run(watch, scaler, range(8, 9))
    assert {name: facts[name] for name in ("first_step", "last_step", "updates", "skipped", "good_last")} == {
        "first_step": 0,
        "last_step": 4,
        "updates": 5,
        "skipped": 2,
        "good_last": 3,
    }
    assert (facts["loss_scale_before"], facts["loss_scale_after"]) == (4096.0, 1024.0)


def test_a_scale_that_stays_0_tells_no_more() -> None:
    scaler = _Scaler()
    watch = ScaleWatch(torch, CostMeter(), ScaleState(2.0**-137, 0))
    scaler.set_state(0.0, 0, torch.tensor)  # on the CPU a copy is finished at once
    (facts,) = _run(watch, scaler, range(40))
    assert (facts["updates"], facts["skipped"], facts["loss_scale_after"]) == (5, 3, 0.0)


def test_nothing_is_read_while_a_graph_is_captured() -> None:
    scaler, torch_ = _Scaler(), _Torch()
    watch = ScaleWatch(torch_, CostMeter(), ScaleState(4096.0, 0))
    torch_.cuda.is_capturing = True
    scaler.set_state(1024.0, 3)
    assert not _run(watch, scaler, range(8))
    torch_.cuda.is_capturing, _Event.is_done = False, True
    assert not _run(watch, scaler, range(8, 20))  # the first reading afterwards has none before it
    assert DeviceCopy(torch_).begin([_OnGpu(1.0)])


def test_an_error_of_the_readings_reaches_nobody() -> None:
    meter, scaler = CostMeter(), object()  # of a PyTorch that keeps its scale elsewhere
    watch = ScaleWatch(_Torch(), meter, ScaleState(4096.0, 0))
    assert not _run(watch, scaler, range(20))
    assert meter.errors == 1


def test_a_scaler_is_not_kept_alive() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scale = LossScale(scaler, is_new=True)
    scale.watch = ScaleWatch(torch, CostMeter(), scale.state)
    scaler.scale(torch.ones(1))
    for step in range(3):
        scale.watch.follow_update(step * 2 * _S + 1, scaler, step)
    gone = weakref.ref(scaler)
    del scaler
    gc.collect()
    assert gone() is None
