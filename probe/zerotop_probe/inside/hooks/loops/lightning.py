"""Hooks into PyTorch Lightning, whose Trainer has its own evaluation loop, and knows accumulation and planned steps."""

from __future__ import annotations

import sys
from typing import Any

from zerotop_probe.inside.guard import now, wrap_method
from zerotop_probe.inside.hooks.logging_hooks import LoggingHooks
from zerotop_probe.inside.hooks.loops.loop import Loop
from zerotop_probe.inside.span import Span
from zerotop_probe.recording import events

# The same modules are published under two names.
PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class LightningHooks:
    """Hooks on Lightning's Trainer in one process."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def install_hooks(self) -> None:
        """Wrap the methods of those packages that are imported."""
        meter = self._loop.probe.meter
        for package in PACKAGES:
            loops = sys.modules.get(f"{package}.loops.evaluation_loop")
            if loops is not None:
                wrap_method(loops._EvaluationLoop, "run", self._begin_evaluation, self._loop.end_span, meter)
                # The loop of batches begins after the optimizers were made: this call sees the Trainer in time.
                fit_loop = sys.modules[f"{package}.loops.fit_loop"]._FitLoop
                connectors = f"{package}.trainer.connectors.logger_connector.logger_connector"
                logging = LoggingHooks(self._loop.probe)
                logging.install_lightning(sys.modules[connectors])
                monitors = sys.modules.get(f"{package}.callbacks.lr_monitor")
                if monitors is not None:
                    logging.install_rate_monitor(monitors.LearningRateMonitor)
                wrap_method(fit_loop, "run", self._begin_training, self._end_training, meter)

    def _begin_training(self, time_ns: int, fit_loop: Any, args: Any, kwargs: Any) -> Any:
        trainer = fit_loop.trainer
        self._loop.probe.library.follow_lightning(trainer.accumulate_grad_batches, trainer.max_steps)
        recorder = self._loop.find_recorder()
        if recorder is not None and trainer.max_steps > 0:
            recorder.write_event(now(), events.TotalSteps, steps=trainer.max_steps, source="trainer")
        return None  # nothing to do at its end

    def _end_training(self, token: Any, time_ns: int, flags: int, result: Any) -> None:
        """Do nothing: it is never called, as no call has a token."""

    def _begin_evaluation(self, time_ns: int, evaluation: Any, args: Any, kwargs: Any) -> Span | None:
        recorder = self._loop.find_recorder()
        if recorder is None or not self._loop.is_training_thread(False) or recorder.find_phase("eval"):
            return None
        self._loop.resume_training(time_ns)
        return recorder.begin_span(time_ns, "eval", self._loop.get_position())
