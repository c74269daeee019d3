"""PyTorch's CUDA allocator: its counters at phase boundaries, and ten times a second in between.

Only on CUDA, and only counters the allocator keeps anyway: nothing is synchronized, allocated or reset. The
peaks are those since the process began or since its user reset them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zerotop_probe.inside.part import Meter, Part, now
from zerotop_probe.recording.tables import ALLOCATOR, BEGIN, END, TICK, UNKNOWN
from zerotop_probe.recording.writer import Identity, RecordWriter

if TYPE_CHECKING:
    from zerotop_probe.inside.recorder import Span

_TICK_SECONDS = 0.1

# A reading takes 9 us beside an H200, the larger part of what a boundary costs there. One phase often begins
# soon after another has ended, with little but the loop's own code in between: then the reading at that end
# serves for the beginning too, and says when it was taken. An end, where peaks are told, is read anew unless
# the reading before it took place within about the time of launching a kernel.
_FRESH_NS = {BEGIN: 150_000, END: 30_000, TICK: 30_000}

# The allocator's counters of a device, nested as PyTorch's C function gives them.
Read = Callable[[int], "dict[str, Any]"]


class Allocator:
    """Reads and records the allocator of one device."""

    def __init__(self, session: str, identity: Identity, device: int, read: Read, meter: Meter) -> None:
        """``device`` is the process's own ordinal; ``read`` is ``torch._C._cuda_memoryStats``, or alike."""
        self._read = read
        self._device = device
        self._counters: tuple[int, ...] = ()
        self._read_ns = -max(_FRESH_NS.values()) - 1
        self._writer = RecordWriter(session, ALLOCATOR, identity)
        self._part = Part("allocator", meter)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def lost(self) -> int:
        """Records that could not be written so far."""
        return self._writer.lost

    def sample(self, span: Span, edge: int) -> None:
        """Records the counters at an edge of ``span``."""
        if self._part.on:
            try:
                self._record(span.step, span.micro_step, span.phase, edge)
            except Exception as error:
                self._part.fail(error)

    def _record(self, step: int, micro_step: int, phase: int, edge: int) -> None:
        time_ns = now()
        if time_ns - self._read_ns > _FRESH_NS[edge]:
            # In this order, so that another thread never takes old counters for new ones.
            self._counters = _counters(self._read(self._device))
            self._read_ns = time_ns
        self._writer.write(self._read_ns, *self._counters, step, micro_step, phase, edge, self._device, 0)

    def start_ticker(self, stack: list[Span]) -> None:
        """Starts a daemon thread that records the counters too; the innermost of ``stack`` is where it is."""
        self._thread = threading.Thread(target=self._tick, args=(stack,), name="zerotop-ticker", daemon=True)
        self._thread.start()

    def _tick(self, stack: list[Span]) -> None:
        place = (0, 0, 0)
        while not self._stop.wait(_TICK_SECONDS):
            try:
                span = stack[-1]
                place = (span.step, span.micro_step, span.phase)
            except IndexError:
                place = (place[0], place[1], 0)
            try:
                self._record(*place, TICK)
            except Exception as error:
                self._part.fail(error)
                return

    def stop_ticker(self) -> None:
        """Stops the thread before the interpreter takes itself apart."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def close(self) -> None:
        """Closes the file and touches no lock: in a forked child the ticker is gone, perhaps holding one."""
        self._writer.close()


def _counters(stats: dict[str, Any]) -> tuple[int, ...]:
    """The fields of a record from ``allocated_bytes`` to ``ooms``; -1 for what this torch does not count."""
    allocated = stats.get("allocated_bytes", {}).get("all", {})
    reserved = stats.get("reserved_bytes", {}).get("all", {})
    inactive = stats.get("inactive_split_bytes", {}).get("all", {})
    return (
        allocated.get("current", UNKNOWN),
        allocated.get("peak", UNKNOWN),
        reserved.get("current", UNKNOWN),
        reserved.get("peak", UNKNOWN),
        inactive.get("current", UNKNOWN),
        stats.get("num_alloc_retries", UNKNOWN),
        stats.get("num_ooms", UNKNOWN),
    )
