"""Evaluation in a loop of the user's own, which nothing announces: recognised by forwards that cannot train.

The phase is taken to last from the first such forward to the last one before training goes on. So its end is
known only afterwards, and whether a batch that was fetched in between was still for it, only with the next
forward.
"""

from __future__ import annotations

from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.inside.span import Span


class EvaluationDetector:
    """The evaluation that seems to be in progress, if any."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._span: Span | None = None
        self._last_forward_ns = 0
        self._held_fetches: list[tuple[Span, int]] = []

    @property
    def is_open(self) -> bool:
        """Whether an evaluation seems to be in progress."""
        return self._span is not None

    def begin_forward(self, time_ns: int, position: tuple[int, int, int]) -> None:
        """A forward outside of any phase that cannot train."""
        if self._span is None:
            self._span = self._recorder.begin_span(time_ns, "eval", position)
        self._release_fetches(self._span.depth + 1)

    def end_forward(self, time_ns: int) -> None:
        """That forward has ended, and perhaps the evaluation with it: its last chance to have its peak seen."""
        self._last_forward_ns = time_ns
        if self._span is not None and self._recorder.device is not None:
            self._recorder.device.restart_window(time_ns, self._span)

    def hold_fetch(self, span: Span, end_ns: int) -> None:
        """Keeps a finished fetch of data until it is known whom it was for."""
        self._recorder.stack.remove(span)
        self._held_fetches.append((span, end_ns))

    def close(self) -> None:
        """Training goes on, or the process ends: the evaluation ended with its last forward."""
        span, self._span = self._span, None
        if span is not None:
            self._recorder.end_span(span, self._last_forward_ns)
            self._release_fetches(span.depth)

    def _release_fetches(self, depth: int) -> None:
        for span, end_ns in self._held_fetches:
            span.depth = depth
            self._recorder.write_span(span, end_ns)
        self._held_fetches.clear()
