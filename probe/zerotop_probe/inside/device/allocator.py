"""Sample the counters of PyTorch's CUDA allocator at phase boundaries, and up to ten times a second in long phases.

Only counters that the allocator maintains anyway are read: nothing is synchronized or allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from zerotop_probe.inside.guard import CostMeter, Guard, now
from zerotop_probe.inside.span import Span
from zerotop_probe.recording.rings.ring_files import RankFiles
from zerotop_probe.recording.tables import ALLOCATOR, BEGIN, END, TICK, UNKNOWN

# A read takes 8 us on a host with an H200 and twice that in a real loop, most of the cost of a boundary. A read is therefore
# skipped if the job had control for less than this since the previous one, and the window continues: allocations in the
# millisecond before a phase count to that phase.
_MIN_INTERVAL_NS = {BEGIN: 1_000_000, END: 30_000}

# Ticks between boundaries, and how long the ticker rests while boundaries are as frequent: at each tick the training thread
# may have to wait for Python's lock.
_TICK_NS, _REST_S = 100_000_000, 0.3

# Returns the allocator's counters, nested as PyTorch's C function returns them.
CounterReader = Callable[[], "dict[str, Any]"]

NATIVE, ASYNC = "native", "cudaMallocAsync"


class StepMemory(NamedTuple):
    """The counters of the allocator for a step or an evaluation; sizes are bytes."""

    held: int  # allocated at its end
    peak: int  # the highest allocated in it
    allocations: int  # so far
    reserved: int = 0  # at its end


def find_backend(torch: Any) -> str:
    """Return PyTorch's name of the allocator in use: :data:`NATIVE`, :data:`ASYNC`, or "pluggable" for one of the job's own.

    The second counts no blocks, has no history and no out-of-memory callback; the third counts nothing.
    """
    read = getattr(torch.cuda, "get_allocator_backend", None)
    return str(read()) if read is not None else NATIVE


class AllocatorSampler:
    """A sampler of the allocator of one device."""

    def __init__(
        self,
        files: RankFiles,
        device: int,
        reads: tuple[CounterReader, CounterReader],
        meter: CostMeter,
        *,
        windows: bool,
        has_blocks: bool = True,
    ) -> None:
        """Create the file. ``device`` is the CUDA ordinal in this process.

        ``reads``: the counter readers at and between boundaries. ``windows``: the first resets the peaks.
        ``has_blocks``: the allocator counts requested bytes and segments; else those counters are 0 and not recorded.
        """
        self._has_blocks = has_blocks
        self._read_at_boundary, self._read_between = reads
        self._device = device
        self._last_read_ns = -max(_MIN_INTERVAL_NS.values())
        peaks = "window" if windows else "process"
        self._writer = files.open_table(ALLOCATOR, peaks=peaks)
        self._last_stats: dict[str, Any] = {}
        self.allocations = UNKNOWN
        """Blocks that the allocator had handed out when it was last read."""
        self._step_peak = UNKNOWN
        self._guard = Guard("allocator", meter)

    def sample_edge(self, time_ns: int, span: Span, edge: int) -> None:
        """Record the counters at the begin or end of ``span``, which is at ``time_ns``."""
        if not self._guard.is_on or time_ns - self._last_read_ns < _MIN_INTERVAL_NS[edge]:
            return
        try:
            self._write_counters(time_ns, self._read_at_boundary(), span.step, span.micro_step, span.phase, edge)
        except BaseException as error:
            self._guard.settle(error)
        self._last_read_ns = now()

    def _write_counters(
        self, time_ns: int, stats: dict[str, Any], step: int, micro_step: int, phase: int, edge: int
    ) -> None:
        if not self._has_blocks:
            stats = {name: value for name, value in stats.items() if name not in ("requested_bytes", "segment")}
        counters = extract_counters(stats)
        self._writer.write(
            time_ns,
            *counters,
            step,
            micro_step,
            phase,
            edge,
            self._device,
            stats.get("segment", {}).get("all", {}).get("current", UNKNOWN),
            stats.get("num_device_alloc", UNKNOWN),
            stats.get("num_device_free", UNKNOWN),
        )
        self._last_stats = stats
        self.allocations = stats.get("allocation", {}).get("all", {}).get("allocated", UNKNOWN)
        if counters[1] > self._step_peak:
            self._step_peak = counters[1]

    def take_memory(self) -> StepMemory | None:
        """Return the values counted since the last call; None if nothing was read since."""
        stats, peak = self._last_stats, self._step_peak
        self._last_stats, self._step_peak = {}, UNKNOWN
        if not stats:
            return None
        held = stats.get("allocated_bytes", {}).get("all", {}).get("current", UNKNOWN)
        reserved = stats.get("reserved_bytes", {}).get("all", {}).get("current", 0)
        return StepMemory(held, peak, stats.get("allocation", {}).get("all", {}).get("allocated", 0), reserved)

    def sample_between(self, step: int, micro_step: int, phase: int) -> float:
        """Record the counters between boundaries, unless boundaries are frequent; return the seconds until the next time."""
        time_ns = now()
        if time_ns - self._last_read_ns < _TICK_NS:
            return _REST_S
        self._write_counters(time_ns, self._read_between(), step, micro_step, phase, TICK)
        return _TICK_NS / 1e9


def extract_counters(stats: dict[str, Any]) -> tuple[int, ...]:
    """Return the fields of a record from ``allocated_bytes`` to ``ooms``; -1 for counters that this torch lacks."""
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
