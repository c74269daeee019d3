"""The data phase: every batch that the training thread fetches from a torch ``DataLoader``."""

from __future__ import annotations

import sys
import weakref
from threading import get_ident
from typing import Any

from zerotop_probe.inside.guard import wrap_method
from zerotop_probe.inside.hooks.loader_starts import LoaderStarts
from zerotop_probe.inside.probe import Probe
from zerotop_probe.inside.span import Span
from zerotop_probe.recording.tables import ANOTHER_ITERATOR, PHASE_CODE

_DATA = PHASE_CODE["data"]


class DataLoaderHooks:
    """Hooks on the data loaders of one process."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._starts = LoaderStarts()
        # The iterator of the last fetch, where the training was then, and the iterator of the last batch that it used.
        self._last: weakref.ref[Any] | None = None
        self._position = (0, 0, 0)
        self._trained: weakref.ref[Any] | None = None

    def install_hooks(self) -> None:
        """Wrap the iterator class of all data loaders, if torch is imported."""
        module = sys.modules.get("torch.utils.data.dataloader")
        iterator = getattr(module, "_BaseDataLoaderIter", None)
        if iterator is not None:
            probe = self._probe
            self._starts.install_hooks(module, probe.meter)
            wrap_method(iterator, "__next__", self._begin_fetch, self._end_fetch, probe.meter, probe.counting)

    def _begin_fetch(self, time_ns: int, iterator: Any, args: Any, kwargs: Any) -> Span | None:
        recorder = self._probe.recorder
        if recorder is None or get_ident() != self._probe.training_thread:
            return None
        self._starts.record(recorder.write_event)
        state = self._probe.engines.current
        if recorder.is_quick and not recorder.stack and state is not None:
            return self.mark_source(recorder.begin_quick(time_ns, _DATA, state), iterator)
        recorder.end_loose_spans(time_ns)
        if len(recorder.stack) > 1 or (recorder.stack and recorder.find_phase("eval") is None):
            return None
        return self.mark_source(recorder.begin_span(time_ns, "data", self._probe.engines.get_position()), iterator)

    def mark_source(self, span: Span, iterator: Any) -> Span:
        """Mark a fetch from another iterator than the one that is trained with: an evaluation's, for example."""
        position = span.engine, span.step, span.micro_step
        if position != self._position:
            self._position, self._trained = position, self._last
        self._last = weakref.ref(iterator)
        if self._trained is not None and self._trained() is not iterator:
            span.flags |= ANOTHER_ITERATOR
        return span

    def _end_fetch(self, span: Span, time_ns: int, flags: int, result: Any) -> None:
        recorder, evaluation = self._probe.recorder, self._probe.evaluation
        if recorder is None:
            return
        if not span.is_quick and evaluation is not None and evaluation.is_open and span in recorder.stack:
            span.flags |= flags
            evaluation.hold_fetch(span, time_ns)
        else:
            recorder.end_span(span, time_ns, flags)
