"""What ``y`` copies of the memory screen: bytes, tabs between columns, a heading first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zerotop.analysis.memory.memory_table import Line
from zerotop.analysis.memory.microscope import Look
from zerotop.analysis.memory.phase_peaks import PhasePeak
from zerotop.analysis.processes.phases import name


def ledger_text(lines: Sequence[Line]) -> str:
    """A row for each line of a ledger."""
    columns = ("now_bytes", "peak_bytes", "expected_bytes", "difference_bytes", "pinned_bytes")
    return _text(("row", *columns), ((line.label, *(getattr(line, column) for column in columns)) for line in lines))


def peaks_text(peaks: Sequence[PhasePeak]) -> str:
    """A row for each phase."""
    columns = ("phase", "allocated_bytes", "reserved_bytes", "step", "micro_step")
    return _text(columns, ([getattr(peak, column) for column in columns] for peak in peaks))


def curve_text(look: Look) -> str:
    """A row for each allocation and free: when after the look's beginning, what was held from then on, in which phase."""
    times, sizes = (look.times_ns - look.begin_ns).tolist(), look.curve_bytes.tolist()
    phases = (name(code) for code in look.phases.tolist())
    return _text(("after_ns", "requested_bytes", "phase"), zip(times, sizes, phases, strict=True))


def _text(heading: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    told = ["\t".join("" if value is None else str(value) for value in row) for row in rows]
    return "\n".join(("\t".join(heading), *told)) if told else ""
