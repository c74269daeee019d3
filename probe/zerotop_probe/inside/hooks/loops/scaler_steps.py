"""Steps of optimizers that a loss scaler makes, and updates that it skips."""

from __future__ import annotations

import sys
import weakref
from typing import Any, NamedTuple

from zerotop_probe.inside.guard import NEVER_COUNTED, now, wrap_method
from zerotop_probe.inside.hooks.loops.loss_scale import LossScale, ScaleWatch
from zerotop_probe.inside.hooks.loops.optimizer_steps import OptimizerStepHooks
from zerotop_probe.inside.hooks.loops.scaled_clipping import ClippingWatch
from zerotop_probe.inside.hooks.loops.step_in_progress import StepInProgress
from zerotop_probe.inside.span import Span
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import FAILED, SKIPPED

_SCALERS = (
    ("torch.amp.grad_scaler", "GradScaler"),
    ("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler"),
)


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
        self._clipping = ClippingWatch()
        # (step, loss scale before) of a skipped step whose scaler is not updated yet.
        self._overflow: tuple[int, float | None] | None = None

    def install_hooks(self) -> None:
        """Wrap the methods of PyTorch's loss scalers, including those that FSDP1's scaler overrides."""
        meter = self._probe.meter
        self._clipping.install_hooks()
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
        self._follow_clipping(time_ns, scaler, optimizer)
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

    def _follow_clipping(self, time_ns: int, scaler: Any, optimizer: Any) -> None:
        is_only = len(self._loop.list_optimizers()) == 1
        facts = self._clipping.end_update(scaler, optimizer, self._find_scale(scaler).value, is_only=is_only)
        if facts is not None:
            self._write(time_ns, events.ScaledClipping, {"step": self._loop.get_position()[1], **facts})

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
            token.scale.step = self._loop.get_position()[1]
            if skipped:
                self._overflow = token.scale.step, token.scale.value
        if token.span is None:
            self._steps.finish_counted(step.begin_ns, time_ns, token.optimizer, SKIPPED if skipped else 0)
            return
        self._steps.finish_step(recorder, token.span, token.optimizer, time_ns, SKIPPED if skipped else 0)

    def _begin_update(self, time_ns: int, scaler: Any, args: Any, kwargs: Any) -> tuple[LossScale, Any, Any] | None:
        scale = self._scales.get(scaler)
        return None if scale is None else (scale, scaler, kwargs.get("new_scale", args[0] if args else None))

    def _end_update(self, token: tuple[LossScale, Any, Any], time_ns: int, flags: int, result: Any) -> None:
        scale, scaler, new_scale = token
        if flags & FAILED:
            return
        if scale.is_unclear and scale.watch is None:
            scale.watch = ScaleWatch(sys.modules["torch"], self._probe.meter, scale.state)
        scale.update(scaler, new_scale)
        if scale.watch is not None and new_scale is None:
            self._write(time_ns, events.SkippedUpdates, scale.watch.follow_update(time_ns, scaler, scale.step))
        overflow, self._overflow = self._overflow, None
        if overflow is not None:
            step, before = overflow
            self._write(
                time_ns, events.Overflow, {"step": step, "loss_scale_before": before, "loss_scale_after": scale.value}
            )

    def _write(self, time_ns: int, kind: type[events.Event], facts: dict[str, Any] | None) -> None:
        if facts is not None and self._probe.recorder is not None:
            self._probe.recorder.write_event(time_ns, kind, engine=self._loop.get_position()[0], **facts)

    def _begin_load(self, time_ns: int, scaler: Any, args: Any, kwargs: Any) -> tuple[LossScale, Any] | None:
        scale = self._scales.get(scaler)
        return None if scale is None else (scale, kwargs.get("state_dict", args[0] if args else {}))

    def _end_load(self, token: tuple[LossScale, Any], time_ns: int, flags: int, result: Any) -> None:
        scale, state = token
        if not flags & FAILED:
            scale.load(state)
