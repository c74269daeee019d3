"""How long the GPU worked on a phase: CUDA events at its edges, asked later and never waited for.

The host only enqueues work, so that its own times say when a phase was asked for, not when it was done.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from zerotop_probe.inside.guard import Meter, Part, now
from zerotop_probe.recording.tables import DEVICE_TIMES
from zerotop_probe.recording.writer import Identity, RecordWriter

if TYPE_CHECKING:
    from zerotop_probe.inside.recorder import Span

# A job that never reaches the end of a step, or a GPU that hangs, must not let these grow.
_MOST_PENDING = 256


class DeviceClock:
    """Measures spans on the stream that is current at their edges, on one device."""

    def __init__(self, session: str, identity: Identity, device: int, cuda: Any, meter: Meter) -> None:
        """``device`` is the process's own ordinal; ``cuda`` is ``torch.cuda``."""
        self._cuda = cuda
        self._device = device
        self._writer = RecordWriter(session, DEVICE_TIMES, identity)
        self._part = Part("device clock", meter)
        self._free: list[Any] = []
        self._pending: deque[tuple[Span, Any, Any]] = deque()

    @property
    def lost(self) -> int:
        """Records that could not be written so far."""
        return self._writer.lost

    def begins(self, span: Span) -> None:
        """Marks where the GPU comes to a span."""
        if self._part.on and len(self._pending) < _MOST_PENDING:
            try:
                span.mark = self._mark()
            except Exception as error:
                self._part.fail(error)

    def ends(self, span: Span) -> None:
        """Marks where the GPU is done with it."""
        if self._part.on and span.mark is not None:
            try:
                end = self._mark()
                if end is not None:
                    self._pending.append((span, span.mark, end))
                span.mark = None
            except Exception as error:
                self._part.fail(error)

    def _mark(self) -> Any:
        cuda = self._cuda
        # An event that is recorded into a graph, or on another device, tells nothing.
        if cuda.is_current_stream_capturing() or cuda.current_device() != self._device:
            return None
        event = self._free.pop() if self._free else cuda.Event(enable_timing=True)
        event.record()
        return event

    def collect(self) -> None:
        """Records what the GPU has come past by now."""
        if self._part.on:
            try:
                while self._pending and self._pending[0][2].query():
                    self._write(*self._pending.popleft())
            except Exception as error:
                self._part.fail(error)

    def _write(self, span: Span, begin: Any, end: Any) -> None:
        device_ns = round(begin.elapsed_time(end) * 1e6)
        self._free += (begin, end)
        self._writer.write(
            now(), span.begin_ns, device_ns, span.step, span.micro_step, span.phase, span.depth, span.engine, 0
        )

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()
