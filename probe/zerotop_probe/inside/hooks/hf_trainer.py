"""The Hugging Face Trainer, which evaluates without the engine and knows the number of planned steps."""

from __future__ import annotations

from typing import Any

from zerotop_probe.inside.guard import now, wrap_method
from zerotop_probe.inside.hooks.training_hooks import TrainingHooks
from zerotop_probe.inside.inspection import batch_shape
from zerotop_probe.inside.span import Span
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import EVAL


class TrainerHooks(TrainingHooks):
    """Hooks on ``transformers.Trainer`` in one process."""

    def install_hooks(self, module: Any) -> None:
        """Wrap the methods of ``module``, which is ``transformers.trainer``."""
        meter = self._probe.meter
        for name in ("evaluation_loop", "prediction_loop"):
            wrap_method(module.Trainer, name, self._begin_evaluation, self.end_span, meter)
        wrap_method(module.CallbackHandler, "on_train_begin", self._read_total_steps, self._write_total_steps, meter)

    def _begin_evaluation(self, time_ns: int, trainer: Any, args: Any, kwargs: Any) -> Span | None:
        probe, recorder = self._probe, self._probe.recorder
        if recorder is None or not probe.is_training_thread():
            return None
        recorder.end_loose_spans(time_ns)
        if probe.evaluation is not None:
            probe.evaluation.close()
        if recorder.find_phase("eval"):
            return None
        # Trainers of other libraries override prediction_step; each class is wrapped at its first evaluation.
        for kind in type(trainer).__mro__:
            wrap_method(kind, "prediction_step", self._begin_prediction, self.end_span, probe.meter)
        return recorder.begin_span(time_ns, "eval", probe.engines.get_position())

    def _begin_prediction(self, time_ns: int, trainer: Any, args: Any, kwargs: Any) -> Span | None:
        recorder = self._probe.recorder
        if recorder is None or not self._probe.is_training_thread() or recorder.find_phase("forward"):
            return None
        span = recorder.begin_span(time_ns, "forward", self._probe.engines.get_position())
        inputs = kwargs.get("inputs", args[1] if len(args) > 1 else None)
        span.rows, span.sequence, span.tokens = batch_shape.measure_batch((inputs,), {})
        recorder.last_forward = span
        span.flags = EVAL
        return span

    def _read_total_steps(self, time_ns: int, handler: Any, args: Any, kwargs: Any) -> int | None:
        arguments = kwargs.get("args", args[0] if args else None)
        state = kwargs.get("state", args[1] if len(args) > 1 else None)
        steps = getattr(state, "max_steps", 0)
        self._probe.library.follow_trainer(arguments, steps)
        return int(steps) if self._probe.recorder is not None and steps > 0 else None

    def _write_total_steps(self, steps: int, time_ns: int, flags: int, result: Any) -> None:
        if self._probe.recorder is not None:
            self._probe.recorder.write_event(now(), events.TotalSteps, steps=steps, source="trainer")
