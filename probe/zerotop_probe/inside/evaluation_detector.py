"""Detect an evaluation in a hand-written loop, which calls no hook: by forwards that cannot train.

The phase lasts from the first such forward to the last one before training resumes. So its end is known only afterwards, and
only the next forward shows whether a batch fetched before it belongs to the evaluation.
"""

from __future__ import annotations

from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.inside.span import Span


class EvaluationDetector:
    """The evaluation in progress, if any."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.span: Span | None = None
        self.is_open = False
        """Whether an evaluation is in progress."""
        self._last_forward_ns = 0
        self._held_fetches: list[tuple[Span, int]] = []

    def begin_forward(self, time_ns: int, position: tuple[int, int, int]) -> None:
        """Begin an evaluation, unless one is in progress, before a forward that cannot train."""
        if self.span is None:
            self.span = self._recorder.begin_span(time_ns, "eval", position)
            self.is_open = True
        self._release_fetches(self.span.depth + 1)

    def end_forward(self, time_ns: int) -> None:
        """Note the end of that forward, which may be the end of the evaluation: read the allocator's peak now."""
        self._last_forward_ns = time_ns
        if self.span is not None and self._recorder.device is not None:
            self._recorder.device.restart_window(time_ns, self.span)

    def hold_fetch(self, span: Span, end_ns: int) -> None:
        """Keep a finished fetch of data until the next forward shows whether it was for the evaluation."""
        self._recorder.stack.remove(span)
        self._held_fetches.append((span, end_ns))

    def close(self) -> None:
        """End the evaluation with its last forward, because training resumes or the process exits."""
        span, self.span, self.is_open = self.span, None, False
        if span is not None:
            self._recorder.end_span(span, self._last_forward_ns)
            self._release_fetches(span.depth)

    def _release_fetches(self, depth: int) -> None:
        for span, end_ns in self._held_fetches:
            span.depth = depth
            self._recorder.write_span(span, end_ns)
        self._held_fetches.clear()
