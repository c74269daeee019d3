"""The generate phase: text that a transformers model writes, for example for reinforcement learning.

It calls the model once for each token. These forwards are not recorded one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

from zerotop_probe.inside.guard import wrap_method
from zerotop_probe.inside.probe import Probe
from zerotop_probe.inside.span import Span
from zerotop_probe.recording.tables import PHASE_CODE

_EVAL = PHASE_CODE["eval"]


class GenerationHooks:
    """Hooks on ``generate()`` of transformers models in one process."""

    def __init__(self, probe: Probe, evaluates: Callable[[Any], bool]) -> None:
        """``evaluates``: whether a call of a model that does not train is an evaluation."""
        self._probe = probe
        self._evaluates = evaluates

    def install_hooks(self) -> None:
        """Wrap the method that all models inherit, if transformers has loaded it."""
        owner = getattr(sys.modules.get("transformers.generation.utils"), "GenerationMixin", None)
        if owner is not None:
            wrap_method(owner, "generate", self._begin_generation, self._end_generation, self._probe.meter)

    def _begin_generation(self, time_ns: int, model: Any, args: Any, kwargs: Any) -> Span | None:
        probe, recorder = self._probe, self._probe.recorder
        if recorder is None or get_ident() != probe.training_thread:
            return None
        recorder.end_loose_spans(time_ns)
        outer = recorder.current_span()
        if outer is not None and outer.phase != _EVAL:
            return None
        position, evaluation = probe.engines.get_position(), probe.evaluation
        if evaluation is not None and (evaluation.is_open or (outer is None and self._evaluates(model))):
            evaluation.begin_forward(time_ns, position)
        return recorder.begin_span(time_ns, "generate", position)

    def _end_generation(self, span: Span, time_ns: int, flags: int, result: Any) -> None:
        recorder, evaluation = self._probe.recorder, self._probe.evaluation
        if recorder is not None:
            recorder.end_span(span, time_ns, flags)
            if evaluation is not None and evaluation.is_open:
                evaluation.end_forward(time_ns)
