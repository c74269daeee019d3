"""Measure the GPU time of a phase with CUDA events at its edges, queried later and never waited for.

The host only enqueues work: its own times show when a phase was launched, not when the GPU finished it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from zerotop_probe.inside.guard import CostMeter, Guard, now
from zerotop_probe.inside.span import Span
from zerotop_probe.recording.interruptions import is_interruption
from zerotop_probe.recording.rings.ring_files import RankFiles
from zerotop_probe.recording.tables import DEVICE_TIMES

# Limits memory in a job that never reaches the end of a step, or on a GPU that hangs.
_MAX_PENDING = 256


# Streams are cached by their id. Jobs have a few.
_MOST_STREAMS = 64


class CudaCalls(NamedTuple):
    """The CUDA functions that are called at each edge of a phase."""

    is_capturing: Callable[[], bool]
    get_device: Callable[[], int]
    record: Callable[[Any], None]  # an event, into the current stream


def bind_public(cuda: Any) -> CudaCalls:
    """Return the functions of ``torch.cuda``."""
    return CudaCalls(cuda.is_current_stream_capturing, cuda.current_device, lambda event: event.record())


def bind_directly(cuda: Any, binding: Any, device: int) -> CudaCalls | None:
    """Return the functions of ``torch._C`` behind ``torch.cuda``'s events; None if this torch lacks one.

    ``torch.cuda`` checks each time whether CUDA was initialized, and creates a new object for the current stream. This takes
    most of the 70 us that an event costs in a real loop.
    """
    names = ("_cuda_isCurrentStreamCapturing", "_cuda_getDevice", "_cuda_getCurrentStream")
    is_capturing, get_device, get_stream = (getattr(binding, name, None) for name in names)
    record = getattr(getattr(binding, "_CudaEventBase", None), "record", None)
    if is_capturing is None or get_device is None or get_stream is None or record is None:
        return None
    streams: dict[Any, Any] = {}

    def record_event(event: Any) -> None:
        number = get_stream(device)
        stream = streams.get(number)
        if stream is None:
            if len(streams) >= _MOST_STREAMS:
                streams.clear()
            stream = streams[number] = cuda.current_stream()
        record(event, stream)

    return CudaCalls(is_capturing, get_device, record_event)


class DeviceClock:
    """A clock for spans of one device, on the stream that is current at their edges."""

    def __init__(self, files: RankFiles, device: int, cuda: Any, meter: CostMeter, binding: Any = None) -> None:
        """Create the file. ``device`` is the CUDA ordinal in this process, ``cuda`` is ``torch.cuda``.

        ``binding``: ``torch._C``, whose functions are called where it has them.
        """
        self._cuda = cuda
        self._public_calls = bind_public(cuda)
        self._calls = bind_directly(cuda, binding, device) or self._public_calls
        self._device = device
        self._writer = files.open_table(DEVICE_TIMES)
        self._guard = Guard("device clock", meter)
        self._free_events: list[Any] = []
        self._pending_spans: deque[tuple[Span, Any, Any]] = deque()

    def begin_span(self, span: Span) -> None:
        """Record an event at the begin of a span."""
        if self._guard.is_on and len(self._pending_spans) < _MAX_PENDING:
            try:
                span.begin_mark = self._record_event()
            except BaseException as error:
                self._guard.settle(error)

    def end_span(self, span: Span) -> None:
        """Record an event at the end of a span."""
        if self._guard.is_on and span.begin_mark is not None:
            try:
                end = self._record_event()
                if end is not None:
                    self._pending_spans.append((span, span.begin_mark, end))
                span.begin_mark = None
            except BaseException as error:
                self._guard.settle(error)

    def _record_event(self) -> Any:
        is_capturing, get_device, record = self._calls
        try:
            # An event recorded into a CUDA graph, or on another device, measures nothing.
            if is_capturing() or get_device() != self._device:
                return None
            event = self._free_events.pop() if self._free_events else self._cuda.Event(enable_timing=True)
            record(event)
        except Exception as error:
            if self._calls is self._public_calls or is_interruption(error):
                raise
            self._calls = self._public_calls  # the functions of a later torch take something else
            return self._record_event()
        return event

    def write_finished(self) -> None:
        """Write the times of spans that the GPU has finished."""
        # A query would end the capture of a CUDA graph.
        if self._guard.is_on and self._pending_spans and not self._calls.is_capturing():
            try:
                while self._pending_spans and self._pending_spans[0][2].query():
                    self._write_time(*self._pending_spans.popleft())
            except BaseException as error:
                self._guard.settle(error)

    def _write_time(self, span: Span, begin: Any, end: Any) -> None:
        device_ns = round(begin.elapsed_time(end) * 1e6)
        self._free_events += (begin, end)
        self._writer.write(
            now(), span.begin_ns, device_ns, span.step, span.micro_step, span.phase, span.depth, span.engine, 0
        )
