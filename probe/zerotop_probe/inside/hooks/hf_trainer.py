"""The Hugging Face Trainer: it evaluates without the engine, and knows how many steps it will take."""

from __future__ import annotations

from typing import Any

from zerotop_probe.inside import batch_shape
from zerotop_probe.inside.guard import around, now
from zerotop_probe.inside.probe import Probe
from zerotop_probe.inside.recorder import Span
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import EVAL


class TrainerHooks:
    """The hooks of one process on ``transformers.Trainer``."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def install(self, module: Any) -> None:
        """``module`` is ``transformers.trainer``."""
        meter = self._probe.meter
        for name in ("evaluation_loop", "prediction_loop"):
            around(module.Trainer, name, self._evaluation_begins, self._ends, meter)
        around(module.CallbackHandler, "on_train_begin", self._training_begins, self._training_has_begun, meter)

    def _evaluation_begins(self, time_ns: int, trainer: Any, args: Any, kwargs: Any) -> Span | None:
        probe, recorder = self._probe, self._probe.recorder
        if recorder is None or not probe.in_training_thread():
            return None
        recorder.settle(time_ns)
        if probe.guess is not None:
            probe.guess.close()
        if recorder.inside("eval"):
            return None
        # Trainers of other libraries bring their own; each class is wrapped when it is first seen to
        # evaluate.
        for kind in type(trainer).__mro__:
            around(kind, "prediction_step", self._prediction_begins, self._ends, probe.meter)
        return recorder.begin(time_ns, "eval", probe.engines.place())

    def _prediction_begins(self, time_ns: int, trainer: Any, args: Any, kwargs: Any) -> Span | None:
        recorder = self._probe.recorder
        if recorder is None or not self._probe.in_training_thread() or recorder.inside("forward"):
            return None
        span = recorder.begin(time_ns, "forward", self._probe.engines.place())
        inputs = kwargs.get("inputs", args[1] if len(args) > 1 else None)
        span.rows, span.sequence, span.tokens = batch_shape.of((inputs,), {})
        recorder.last_forward = span
        span.flags = EVAL
        return span

    def _ends(self, span: Span, time_ns: int, flags: int, result: Any) -> None:
        if self._probe.recorder is not None:
            self._probe.recorder.end(span, time_ns, flags)

    def _training_begins(self, time_ns: int, handler: Any, args: Any, kwargs: Any) -> int | None:
        state = kwargs.get("state", args[1] if len(args) > 1 else None)
        steps = getattr(state, "max_steps", 0)
        return int(steps) if self._probe.recorder is not None and steps > 0 else None

    def _training_has_begun(self, steps: int, time_ns: int, flags: int, result: Any) -> None:
        if self._probe.recorder is not None:
            self._probe.recorder.event(now(), events.TOTAL_STEPS, steps=steps, source="trainer")
