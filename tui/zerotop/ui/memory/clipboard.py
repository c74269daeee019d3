"""Text that ``y`` copies from the memory screen: tab-separated bytes with a heading."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zerotop.analysis.memory.memory_table import MemoryLine
from zerotop.analysis.memory.microscope import AllocationTrace
from zerotop.analysis.memory.phase_peaks import PhasePeak
from zerotop.analysis.processes.phases import find_phase_name
from zerotop.analysis.text_tables import format_tsv


def format_ledger(lines: Sequence[MemoryLine]) -> str:
    """Format a row for each line of a ledger."""
    columns = ("now_bytes", "peak_bytes", "expected_bytes", "difference_bytes", "pinned_bytes")
    return _format_table(
        ("row", *columns), ((line.describe(), *(getattr(line, column) for column in columns)) for line in lines)
    )


def format_peaks(peaks: Sequence[PhasePeak]) -> str:
    """Format a row for each phase."""
    columns = ("phase", "allocated_bytes", "reserved_bytes", "step", "micro_step")
    return _format_table(columns, ([getattr(peak, column) for column in columns] for peak in peaks))


def format_curve(trace: AllocationTrace) -> str:
    """Format a row for each allocation and free: time since the trace began, bytes held from then on, phase."""
    times, sizes = (trace.times_ns - trace.begin_ns).tolist(), trace.curve_bytes.tolist()
    phases = (find_phase_name(code) for code in trace.phases.tolist())
    return _format_table(("after_ns", "requested_bytes", "phase"), zip(times, sizes, phases, strict=True))


def _format_table(heading: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    cells = list(rows)
    return format_tsv([heading, *cells]) if cells else ""
