"""The base class of hooks on DeepSpeed's engines, other loops and the Trainer."""

from __future__ import annotations

import threading
from typing import Any

from zerotop_probe.inside.engines import TrainingState
from zerotop_probe.inside.probe import Probe
from zerotop_probe.inside.span import Span


class TrainingHooks:
    """Hooks on whatever trains in one process."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def is_training_thread(self, trains: bool) -> bool:
        """Return whether the caller runs in the training thread; a call that ``trains`` outside of any phase defines it."""
        probe, thread = self._probe, threading.get_ident()
        if trains and probe.recorder is not None and not probe.recorder.stack:
            probe.training_thread = thread
        return thread == probe.training_thread

    def resume_training(self, time_ns: int, state: TrainingState | None = None) -> None:
        """End an evaluation and abandoned phases: training resumes with this call, of the engine or loop ``state``."""
        recorder, evaluation = self._probe.recorder, self._probe.evaluation
        if recorder is not None and recorder.stack:
            recorder.end_loose_spans(time_ns)
        if evaluation is not None and evaluation.is_open:
            evaluation.close()
        if state is not None and state.has_optimizer:
            self._probe.engines.current = state

    def end_span(self, span: Span, time_ns: int, flags: int, result: Any) -> None:
        """End a phase after the call that it measures."""
        if self._probe.recorder is not None:
            self._probe.recorder.end_span(span, time_ns, flags)
