"""PyTorch's CUDA allocator: its counters at phase boundaries, and ten times a second in between.

Only on CUDA, and only counters that the allocator keeps anyway: nothing is synchronized or allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerotop_probe.inside.guard import CostMeter, Guard, now
from zerotop_probe.inside.span import Span
from zerotop_probe.recording.tables import ALLOCATOR, BEGIN, END, TICK, UNKNOWN
from zerotop_probe.recording.writer import Identity, RecordWriter

# A reading takes 8 us beside an H200 and twice that in a real loop, the larger part of what a boundary costs there. So
# nothing is read when the job had control for less than this since the last reading, and the window goes on: what it
# does in the millisecond before a phase counts to that phase.
_MIN_INTERVAL_NS = {BEGIN: 1_000_000, END: 30_000}

# The allocator's counters, nested as PyTorch's C function gives them.
CounterReader = Callable[[], "dict[str, Any]"]

NATIVE, ASYNC = "native", "cudaMallocAsync"


def find_backend(torch: Any) -> str:
    """PyTorch's name for the allocator in force: :data:`NATIVE`, :data:`ASYNC`, or "pluggable" for one of the job's own.

    The second counts no blocks, keeps no history and calls nobody when memory runs out; the third counts nothing at all.
    """
    read = getattr(torch.cuda, "get_allocator_backend", None)
    return str(read()) if read is not None else NATIVE


class AllocatorSampler:
    """Reads and records the allocator of one device."""

    def __init__(
        self,
        session: str,
        identity: Identity,
        device: int,
        reads: tuple[CounterReader, CounterReader],
        meter: CostMeter,
        *,
        windows: bool,
        has_blocks: bool = True,
    ) -> None:
        """``device`` is the process's own ordinal. ``reads``: what reads at a boundary, and what reads in between.

        ``windows``: the reading at a boundary makes the peaks begin anew. ``has_blocks``: it counts what it is asked for
        and its segments, where else their counters stand at 0.
        """
        self._has_blocks = has_blocks
        self._read_at_boundary, self._read_between = reads
        self._device = device
        self._last_read_ns = -max(_MIN_INTERVAL_NS.values())
        peaks = "window" if windows else "process"
        self._writer = RecordWriter(session, ALLOCATOR, identity, peaks=peaks)
        self._guard = Guard("allocator", meter)

    @property
    def lost_records(self) -> int:
        """Records that could not be written so far."""
        return self._writer.lost

    def sample_edge(self, time_ns: int, span: Span, edge: int) -> None:
        """Records the counters at an edge of ``span``; ``time_ns`` is that edge's time."""
        if not self._guard.is_on or time_ns - self._last_read_ns < _MIN_INTERVAL_NS[edge]:
            return
        try:
            self._write_counters(time_ns, self._read_at_boundary(), span.step, span.micro_step, span.phase, edge)
        except Exception as error:
            self._guard.switch_off(error)
        self._last_read_ns = now()

    def _write_counters(
        self, time_ns: int, stats: dict[str, Any], step: int, micro_step: int, phase: int, edge: int
    ) -> None:
        if not self._has_blocks:
            stats = {name: value for name, value in stats.items() if name not in ("requested_bytes", "segment")}
        segments = stats.get("segment", {}).get("all", {}).get("current", UNKNOWN)
        self._writer.write(time_ns, *extract_counters(stats), step, micro_step, phase, edge, self._device, segments)

    def sample_between(self, step: int, micro_step: int, phase: int) -> None:
        """Records the counters in between."""
        self._write_counters(now(), self._read_between(), step, micro_step, phase, TICK)

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


def extract_counters(stats: dict[str, Any]) -> tuple[int, ...]:
    """The fields of a record from ``allocated_bytes`` to ``ooms``; -1 for what this torch does not count."""
    allocated = stats.get("allocated_bytes", {}).get("all", {})
    reserved = stats.get("reserved_bytes", {}).get("all", {})
    requested = stats.get("requested_bytes", {}).get("all", {})
    inactive = stats.get("inactive_split_bytes", {}).get("all", {})
    return (
        allocated.get("current", UNKNOWN),
        allocated.get("peak", UNKNOWN),
        reserved.get("current", UNKNOWN),
        reserved.get("peak", UNKNOWN),
        requested.get("peak", UNKNOWN),
        inactive.get("current", UNKNOWN),
        stats.get("num_alloc_retries", UNKNOWN),
        stats.get("num_ooms", UNKNOWN),
    )
