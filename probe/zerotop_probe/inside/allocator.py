"""PyTorch's CUDA allocator: its counters at phase boundaries, and ten times a second in between.

Only on CUDA, and only counters the allocator keeps anyway: nothing is synchronized, allocated or reset. The
peaks are those since the process began or since its user reset them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zerotop_probe.inside.part import Meter, Part, now
from zerotop_probe.recording.tables import ALLOCATOR, TICK, UNKNOWN
from zerotop_probe.recording.writer import Identity, RecordWriter

if TYPE_CHECKING:
    from zerotop_probe.inside.recorder import Span

_TICK_SECONDS = 0.1

# The allocator's counters of a device, nested as PyTorch's C function gives them.
Read = Callable[[int], "dict[str, Any]"]


class Allocator:
    """Reads and records the allocator of one device."""

    def __init__(self, session: str, identity: Identity, device: int, read: Read, meter: Meter) -> None:
        """``device`` is the process's own ordinal; ``read`` is ``torch._C._cuda_memoryStats``, or alike."""
        self._read = read
        self._device = device
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
        stats = self._read(self._device)
        allocated, reserved = _counter(stats, "allocated_bytes"), _counter(stats, "reserved_bytes")
        self._writer.write(
            now(),
            allocated.get("current", UNKNOWN),
            allocated.get("peak", UNKNOWN),
            reserved.get("current", UNKNOWN),
            reserved.get("peak", UNKNOWN),
            _counter(stats, "inactive_split_bytes").get("current", UNKNOWN),
            stats.get("num_alloc_retries", UNKNOWN),
            stats.get("num_ooms", UNKNOWN),
            step,
            micro_step,
            phase,
            edge,
            self._device,
            0,
        )

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
        """Closes the file; does not wait for the thread, which a forked child does not have."""
        self._stop.set()
        self._writer.close()


def _counter(stats: dict[str, Any], name: str) -> dict[str, int]:
    counter: dict[str, int] = stats.get(name, {}).get("all", {})
    return counter
