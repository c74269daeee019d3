"""Steps of optimizers that a loss scaler makes, and updates that it skips."""

from __future__ import annotations

import math
import struct
import sys
import weakref
from typing import Any, NamedTuple

from zerotop_probe.inside.guard import NEVER_COUNTED, now, wrap_method
from zerotop_probe.inside.hooks.loops.optimizer_steps import OptimizerStepHooks
from zerotop_probe.inside.hooks.loops.step_in_progress import StepInProgress
from zerotop_probe.inside.span import Span
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import FAILED, SKIPPED

_SCALERS = (
    ("torch.amp.grad_scaler", "GradScaler"),
    ("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler"),
)


class LossScale:
    """The loss scale of a ``GradScaler``, computed without reading it: on a GPU a read would wait for the device.

    The rule is PyTorch's, documented for ``update()``: multiply by the backoff factor after a skipped step, by the growth
    factor after ``growth_interval`` steps in a row that were not skipped. ``value`` is None if it can no longer be known.
    """

    def __init__(self, scaler: Any, *, is_new: bool) -> None:
        """``is_new``: the scaler has not been updated yet. Otherwise its scale is unknown until somebody sets it."""
        self._scaler = scaler
        self.value: float | None = float(scaler._init_scale) if is_new else None
        self._streak = int(scaler._init_growth_tracker)
        # Since the last update: whether a step was skipped, and whether that is unknown of one.
        self.was_skipped = False
        self.is_unclear = False

    def load(self, state: dict[str, Any]) -> None:
        """Follow ``load_state_dict``."""
        if state:
            self.value, self._streak = float(state["scale"]), int(state["_growth_tracker"])

    def update(self, new_scale: Any) -> None:
        """Follow ``update(new_scale)``."""
        if new_scale is not None:
            self.value = float(new_scale) if isinstance(new_scale, (int, float)) else None
        elif self.value is not None:
            self.value = self._follow_rule(self.value)
        self.was_skipped = self.is_unclear = False

    def _follow_rule(self, value: float) -> float | None:
        if self.was_skipped:
            self._streak = 0
            return _round(value * self._scaler.get_backoff_factor())
        if self.is_unclear:
            return None
        self._streak += 1
        if self._streak < self._scaler.get_growth_interval():
            return value
        self._streak = 0
        grown = _round(value * self._scaler.get_growth_factor())
        return grown if math.isfinite(grown) else value


def _round(value: float) -> float:
    """Return the nearest float32, in which PyTorch keeps the scale."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf


class _ScaledStep(NamedTuple):
    """A call of ``scaler.step(optimizer)``."""

    span: Span | None  # None in a counted step
    scale: LossScale | None
    optimizer: Any


class ScalerHooks:
    """Hooks on the loss scalers of one process, which call the optimizers in ``steps``."""

    def __init__(self, steps: OptimizerStepHooks) -> None:
        self._steps = steps
        self._loop = steps.loop
        self._probe = steps.loop.probe
        self._counting = self._probe.counting
        self._scales: weakref.WeakKeyDictionary[Any, LossScale] = weakref.WeakKeyDictionary()
        # (step, loss scale before) of a skipped step whose scaler is not updated yet.
        self._overflow: tuple[int, float | None] | None = None

    def install_hooks(self) -> None:
        """Wrap the methods of PyTorch's loss scalers, including those that FSDP1's scaler overrides."""
        meter = self._probe.meter
        for module_name, class_name in _SCALERS:
            scaler_class = getattr(sys.modules.get(module_name), class_name, None)
            if scaler_class is not None:
                wrap_method(scaler_class, "step", self._begin_scaled, self._end_scaled, meter, NEVER_COUNTED)
                wrap_method(scaler_class, "update", self._begin_update, self._end_update, meter, NEVER_COUNTED)
                wrap_method(scaler_class, "load_state_dict", self._begin_load, self._end_load, meter)

    def _begin_scaled(self, time_ns: int, scaler: Any, args: Any, kwargs: Any) -> _ScaledStep | None:
        optimizer = kwargs.get("optimizer", args[0] if args else None)
        recorder = self._loop.find_recorder(adopt=True) if scaler.is_enabled() else None
        if recorder is None or not self._loop.is_training_thread(True) or recorder.find_phase("step"):
            return None
        if self._counting.loop is not None:
            self._steps.step = step = StepInProgress(optimizer, is_scaled=True)
            step.begin_ns, step.backwards = time_ns, self._counting.backwards
            return _ScaledStep(None, self._find_scale(scaler), optimizer)
        self._loop.resume_training(time_ns, self._probe.engines.loop)
        self._loop.prepare_update()
        self._steps.step = step = StepInProgress(optimizer, is_scaled=True)
        step.span = recorder.begin_span(now(), "step", self._loop.get_position(after_backward=True))
        scale = self._find_scale(scaler)
        return _ScaledStep(step.span, scale, optimizer)

    def _find_scale(self, scaler: Any) -> LossScale:
        scale = self._scales.get(scaler)
        if scale is None:
            self._counting.optimizer, self._steps.counter.has_scalers = 0, True  # the scaler may skip its updates
            scale = self._scales[scaler] = LossScale(scaler, is_new=not self._probe.entered_late)
        return scale

    def _end_scaled(self, token: _ScaledStep, time_ns: int, flags: int, result: Any) -> None:
        step, self._steps.step = self._steps.step, None
        recorder = self._probe.recorder
        if step is None or recorder is None or not (step.begin_ns or token.span in recorder.stack):
            return
        if flags & FAILED:
            if token.span is not None:
                recorder.end_span(token.span, time_ns, flags)
            return
        skipped = not step.was_called or step.found_inf
        if token.scale is not None:
            token.scale.was_skipped |= bool(skipped)
            token.scale.is_unclear |= step.was_called and step.found_inf is None
            if skipped:
                self._overflow = self._loop.get_position()[1], token.scale.value
        if token.span is None:
            self._steps.finish_counted(step.begin_ns, time_ns, token.optimizer, SKIPPED if skipped else 0)
            return
        self._steps.finish_step(recorder, token.span, token.optimizer, time_ns, SKIPPED if skipped else 0)

    def _begin_update(self, time_ns: int, scaler: Any, args: Any, kwargs: Any) -> tuple[LossScale, Any] | None:
        scale = self._scales.get(scaler)
        return None if scale is None else (scale, kwargs.get("new_scale", args[0] if args else None))

    def _end_update(self, token: tuple[LossScale, Any], time_ns: int, flags: int, result: Any) -> None:
        scale, new_scale = token
        if flags & FAILED:
            return
        scale.update(new_scale)
        overflow, self._overflow = self._overflow, None
        if overflow is not None and self._probe.recorder is not None:
            step, before = overflow
            facts = {"engine": self._loop.get_position()[0], "loss_scale_before": before, "loss_scale_after": scale.value}
            self._probe.recorder.write_event(time_ns, events.Overflow, step=step, **facts)

    def _begin_load(self, time_ns: int, scaler: Any, args: Any, kwargs: Any) -> tuple[LossScale, Any] | None:
        scale = self._scales.get(scaler)
        return None if scale is None else (scale, kwargs.get("state_dict", args[0] if args else {}))

    def _end_load(self, token: tuple[LossScale, Any], time_ns: int, flags: int, result: Any) -> None:
        scale, state = token
        if not flags & FAILED:
            scale.load(state)
