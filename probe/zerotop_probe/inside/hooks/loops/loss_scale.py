"""The loss scale of a ``GradScaler``: computed without reading it, or read later where only the GPU knows it.

A fused optimizer skips its updates on the GPU. The loss scale and the number of updates since it last changed tell how many
were skipped between two moments. They are copied about once a second, and read when the GPU has finished the copy, which
nobody waits for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

from zerotop_probe.inside.guard import CostMeter, Guard

# Between two readings. In a long job they are rarer, so that it records some thousand events at most.
_PAUSE_NS = 1_000_000_000
_PAUSE_SHARE = 0.005
# Below it float32 rounds the loss scale so much that the number of divisions is lost.
_LEAST_SCALE = 2.0**-140
# How far the number of divisions may be from an integer: float32 rounds each of them.
_TOLERANCE = 0.02


class ScaleRule(NamedTuple):
    """PyTorch's rule, documented for ``update()``: multiply by the backoff factor after a skipped step, by the growth factor
    after ``growth_interval`` steps in a row that were not skipped.
    """

    backoff_factor: float
    growth_factor: float
    growth_interval: int


def read_rule(scaler: Any) -> ScaleRule:
    """Return the rule of a scaler."""
    return ScaleRule(scaler.get_backoff_factor(), scaler.get_growth_factor(), scaler.get_growth_interval())


class ScaleState(NamedTuple):
    """The state of a scaler after an update."""

    scale: float
    streak: int  # updates since the last one that changed the scale


def count_skipped(before: ScaleState, after: ScaleState, updates: int, rule: ScaleRule) -> int | None:
    """Return how many ``updates`` between two states were skipped, at least; None if the rule does not explain them."""
    if not (math.isfinite(before.scale) and math.isfinite(after.scale)) or min(before.scale, after.scale) < 0:
        return None
    grown_most = (before.streak + updates) // rule.growth_interval
    found = (_count_backoffs(before, after, updates, rule, growths) for growths in range(grown_most + 1))
    return min((count for count in found if count is not None), default=None)


def _count_backoffs(before: ScaleState, after: ScaleState, updates: int, rule: ScaleRule, growths: int) -> int | None:
    """Return how many updates were skipped, at least, if the scale grew so many times; None if it cannot have."""
    grown_steps = growths * rule.growth_interval
    if after.streak == before.streak + updates - grown_steps:
        expected = before.scale * rule.growth_factor**growths
        return 0 if math.isclose(after.scale, expected, rel_tol=1e-4) else None
    is_exact = after.scale >= _LEAST_SCALE and before.scale >= _LEAST_SCALE
    if is_exact:
        fall = math.log(before.scale / after.scale) + growths * math.log(rule.growth_factor)
        exact = fall / -math.log(rule.backoff_factor)
        count = round(exact)
        if abs(exact - count) > _TOLERANCE:
            return None
    elif before.scale >= _LEAST_SCALE:
        fall = math.log(before.scale / _LEAST_SCALE) + growths * math.log(rule.growth_factor)
        count = max(1, math.ceil(fall / -math.log(rule.backoff_factor)))
    else:
        count = 1
    good = updates - count
    # Updates that were not skipped: the last ones, those before each growth, and fewer than an interval before each skip.
    others = before.streak + good - after.streak - grown_steps
    has_room = after.streak <= good and (others >= 0 or not growths)
    is_all = not is_exact or others <= count * (rule.growth_interval - 1)
    return count if count >= 1 and has_room and is_all else None


class LossScale:
    """The loss scale of a ``GradScaler``, computed without reading it: on a GPU a read would wait for the device.

    ``value`` is None if it can no longer be known.
    """

    def __init__(self, scaler: Any, *, is_new: bool) -> None:
        """``is_new``: the scaler has not been updated yet. Otherwise its scale is unknown until somebody sets it."""
        self.value: float | None = float(scaler._init_scale) if is_new else None
        self._streak = int(scaler._init_growth_tracker)
        self.step = 0
        """The last step of the loop that the scaler made."""
        # Since the last update: whether a step was skipped, and whether that is unknown of one.
        self.was_skipped = False
        self.is_unclear = False
        self.watch: ScaleWatch | None = None
        """Follows it once only the GPU knows."""

    @property
    def state(self) -> ScaleState | None:
        """Its state if that is known."""
        return None if self.value is None else ScaleState(self.value, self._streak)

    def load(self, state: dict[str, Any]) -> None:
        """Follow ``load_state_dict``."""
        if state:
            self.value, self._streak = float(state["scale"]), int(state["_growth_tracker"])
            if self.watch is not None:
                self.watch.restart(self.state)

    def update(self, scaler: Any, new_scale: Any) -> None:
        """Follow ``update(new_scale)``."""
        if new_scale is not None:
            self.value = float(new_scale) if isinstance(new_scale, (int, float)) else None
            if self.watch is not None:
                self.watch.restart(None)
        elif self.value is not None:
            self.value = self._follow_rule(self.value, read_rule(scaler))
        self.was_skipped = self.is_unclear = False

    def _follow_rule(self, value: float, rule: ScaleRule) -> float | None:
        if self.was_skipped:
            self._streak = 0
            return _round(value * rule.backoff_factor)
        if self.is_unclear:
            return None
        self._streak += 1
        if self._streak < rule.growth_interval:
            return value
        self._streak = 0
        grown = _round(value * rule.growth_factor)
        return grown if math.isfinite(grown) else value


def _round(value: float) -> float:
    """Return the nearest float32, in which PyTorch keeps the scale."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf


class _Stretch:
    """Updates in a row."""

    def __init__(self) -> None:
        self.updates = 0
        self.first_step = self.last_step = 0

    def add(self, step: int) -> None:
        if not self.updates:
            self.first_step = step
        self.updates += 1
        self.last_step = step


class ScaleWatch:
    """Finds out, a little later, how many updates of a scaler the GPU has skipped."""

    def __init__(self, torch: Any, meter: CostMeter, known: ScaleState | None) -> None:
        """``known``: the scaler's state now."""
        self._copy = DeviceCopy(torch)
        self._guard = Guard("loss scale", meter)
        self._before = known
        self._stretch = _Stretch()
        self._pending: _Stretch | None = None
        self._begin_ns = self._read_ns = 0
        self._was_skipping = False

    def restart(self, known: ScaleState | None) -> None:
        """The scale was set: what happened before says nothing about what comes."""
        self._before, self._stretch, self._pending = known, _Stretch(), None

    def follow_update(self, time_ns: int, scaler: Any, step: int) -> dict[str, Any] | None:
        """After an update, in which the scaler made ``step``: return the facts of skipped updates that are known now."""
        if not self._guard.is_on:
            return None
        try:
            facts = self._finish_reading(scaler)
            self._stretch.add(step)
            self._begin_ns = self._begin_ns or time_ns
            pause_ns = max(_PAUSE_NS, round(_PAUSE_SHARE * (time_ns - self._begin_ns)))
            if self._pending is None and time_ns - (self._read_ns or self._begin_ns) >= pause_ns:
                self._begin_reading(time_ns, scaler)
                facts = facts or self._finish_reading(scaler)
        except BaseException as error:
            self._guard.settle(error)
            return None
        return facts

    def _begin_reading(self, time_ns: int, scaler: Any) -> None:
        self._read_ns = time_ns
        if self._copy.begin((scaler._scale, scaler._growth_tracker)):
            self._pending, self._stretch = self._stretch, _Stretch()
        else:
            self.restart(None)  # a graph may replay updates that nobody sees

    def _finish_reading(self, scaler: Any) -> dict[str, Any] | None:
        values = self._copy.read() if self._pending is not None else None
        if self._pending is None or values is None:
            return None
        stretch, before = self._pending, self._before
        after = ScaleState(float(values[0]), int(values[1]))
        self._pending, self._before = None, after
        skipped = count_skipped(before, after, stretch.updates, read_rule(scaler)) if before is not None else None
        if before is None or skipped is None or not (skipped or self._was_skipping):
            return None
        if before.scale == after.scale == 0:
            return None  # it stays 0, and tells no more
        self._was_skipping = skipped > 0
        return {
            "first_step": stretch.first_step,
            "last_step": stretch.last_step,
            "updates": stretch.updates,
            "skipped": skipped,
            "good_last": min(after.streak, stretch.updates),
            "loss_scale_before": before.scale,
            "loss_scale_after": after.scale,
        }


class DeviceCopy:
    """A copy of tensors of one number each, from their device to the host, without waiting for the device."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._copies: list[Any] = []
        self._done: Any = None  # a CUDA event; None where a copy is finished at once

    def begin(self, tensors: Iterable[Any]) -> bool:
        """Begin to copy; return whether that was possible."""
        tensors, torch = list(tensors), self._torch
        kind = tensors[0].device.type
        is_on_gpu = kind == "cuda"
        if not is_on_gpu and kind != "cpu":
            return False
        if is_on_gpu and torch.cuda.is_current_stream_capturing():
            return False
        if not self._copies:
            self._copies = [torch.empty((), dtype=one.dtype, device="cpu", pin_memory=is_on_gpu) for one in tensors]
            self._done = torch.cuda.Event() if is_on_gpu else None
        for copy, tensor in zip(self._copies, tensors):
            copy.copy_(tensor, non_blocking=True)
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(tensors[0].device))
        return True

    def read(self) -> list[float] | None:
        """Return the numbers; None if the copy is not finished yet."""
        # A query would end the capture of a CUDA graph.
        if self._done is not None and (self._torch.cuda.is_current_stream_capturing() or not self._done.query()):
            return None
        return [copy.item() for copy in self._copies]
