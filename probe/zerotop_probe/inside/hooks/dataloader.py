"""Waiting for data: every batch that the training thread takes from a torch ``DataLoader``."""

from __future__ import annotations

import sys
from typing import Any

from zerotop_probe.inside.guard import around
from zerotop_probe.inside.probe import Probe
from zerotop_probe.inside.recorder import Span

# Fetching is a phase of its own in training and within an evaluation, not in the middle of anything else.
_WITHIN = ("", "eval")


class Data:
    """The hooks of one process on data loaders."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def install(self) -> None:
        """Wraps the iterator that all data loaders share, if torch is here."""
        module = sys.modules.get("torch.utils.data.dataloader")
        iterator = getattr(module, "_BaseDataLoaderIter", None)
        if iterator is not None:
            around(iterator, "__next__", self._begins, self._ends, self._probe.meter)

    def _begins(self, time_ns: int, iterator: Any, args: Any, kwargs: Any) -> Span | None:
        recorder = self._probe.recorder
        if recorder is None or not self._probe.in_training_thread():
            return None
        recorder.settle(time_ns)
        if len(recorder.stack) > 1 or (recorder.stack and recorder.inside("eval") is None):
            return None
        return recorder.begin(time_ns, "data", self._probe.engines.place())

    def _ends(self, span: Span, time_ns: int, flags: int, result: Any) -> None:
        recorder, guess = self._probe.recorder, self._probe.guess
        if recorder is None:
            return
        if guess is not None and guess.open and span in recorder.stack:
            span.flags |= flags
            guess.hold(span, time_ns)
        else:
            recorder.end(span, time_ns, flags)
