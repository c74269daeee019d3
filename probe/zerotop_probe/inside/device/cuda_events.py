"""Measure the GPU time of a phase with CUDA events at its edges, queried later and never waited for.

The host only enqueues work: its own times show when a phase was launched, not when the GPU finished it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from zerotop_probe.inside.guard import CostMeter, Guard, now
from zerotop_probe.inside.span import Span
from zerotop_probe.recording.rings.ring_files import RankFiles
from zerotop_probe.recording.tables import DEVICE_TIMES

# Limits memory in a job that never reaches the end of a step, or on a GPU that hangs.
_MAX_PENDING = 256


class DeviceClock:
    """A clock for spans of one device, on the stream that is current at their edges."""

    def __init__(self, files: RankFiles, device: int, cuda: Any, meter: CostMeter) -> None:
        """Create the file. ``device`` is the CUDA ordinal in this process, ``cuda`` is ``torch.cuda``."""
        self._cuda = cuda
        self._device = device
        self._writer = files.open_table(DEVICE_TIMES)
        self._guard = Guard("device clock", meter)
        self._free_events: list[Any] = []
        self._pending_spans: deque[tuple[Span, Any, Any]] = deque()

    @property
    def lost_records(self) -> int:
        """Number of records lost so far."""
        return self._writer.lost

    def begin_span(self, span: Span) -> None:
        """Record an event at the begin of a span."""
        if self._guard.is_on and len(self._pending_spans) < _MAX_PENDING:
            try:
                span.begin_mark = self._record_event()
            except Exception as error:
                self._guard.switch_off(error)

    def end_span(self, span: Span) -> None:
        """Record an event at the end of a span."""
        if self._guard.is_on and span.begin_mark is not None:
            try:
                end = self._record_event()
                if end is not None:
                    self._pending_spans.append((span, span.begin_mark, end))
                span.begin_mark = None
            except Exception as error:
                self._guard.switch_off(error)

    def _record_event(self) -> Any:
        cuda = self._cuda
        # An event recorded into a CUDA graph, or on another device, measures nothing.
        if cuda.is_current_stream_capturing() or cuda.current_device() != self._device:
            return None
        event = self._free_events.pop() if self._free_events else cuda.Event(enable_timing=True)
        event.record()
        return event

    def write_finished(self) -> None:
        """Write the times of spans that the GPU has finished."""
        # A query would end the capture of a CUDA graph.
        if self._guard.is_on and self._pending_spans and not self._cuda.is_current_stream_capturing():
            try:
                while self._pending_spans and self._pending_spans[0][2].query():
                    self._write_time(*self._pending_spans.popleft())
            except Exception as error:
                self._guard.switch_off(error)

    def _write_time(self, span: Span, begin: Any, end: Any) -> None:
        device_ns = round(begin.elapsed_time(end) * 1e6)
        self._free_events += (begin, end)
        self._writer.write(
            now(), span.begin_ns, device_ns, span.step, span.micro_step, span.phase, span.depth, span.engine, 0
        )
