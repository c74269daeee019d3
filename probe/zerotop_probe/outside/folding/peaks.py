"""The highest values of samples between the begin and the end of each step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from zerotop_probe.outside.folding.span_sums import FoldedStep
from zerotop_probe.outside.folding.table_files import TableFiles
from zerotop_probe.recording.tables import ALLOCATOR, BEGIN, FRESH_NS, TICK, UNKNOWN

_TIME, _ALLOCATED, _ALLOCATED_PEAK, _RESERVED, _RESERVED_PEAK, _EDGE = (
    [column.name for column in ALLOCATOR.fields].index(name)
    for name in (
        *("time_ns", "allocated_bytes", "allocated_peak_bytes"),
        *("reserved_bytes", "reserved_peak_bytes", "edge"),
    )
)


class PeakSeries(NamedTuple):
    """Values over time, oldest first."""

    times: list[int]
    values: list[int]

    def find_highest(self, step: FoldedStep) -> int:
        """Return the highest value in a step; if there is none, a fresh last value before it, else UNKNOWN."""
        first, end = bisect_right(self.times, step.previous_ns), bisect_right(self.times, step.end_ns)
        if first < end:
            return max(self.values[first:end])
        if end and step.end_ns - self.times[end - 1] < FRESH_NS:
            return self.values[end - 1]
        return UNKNOWN

    def find_rise(self, step: FoldedStep) -> int:
        """Return the last value recorded during a step if it is higher than the last one before the step, else UNKNOWN."""
        first, end = bisect_right(self.times, step.previous_ns), bisect_right(self.times, step.end_ns)
        before = self.values[first - 1] if first else UNKNOWN
        after = self.values[end - 1] if end else UNKNOWN
        return after if after > before else UNKNOWN

    def has_values(self, step: FoldedStep) -> bool:
        """Whether there is a value in a step."""
        return bisect_right(self.times, step.previous_ns) < bisect_right(self.times, step.end_ns)


def find_allocator_peaks(allocator: TableFiles | None, steps: Sequence[FoldedStep]) -> list[tuple[int, int]]:
    """Return the (allocated, reserved) peak of each step, exact where the allocator's own peak belongs to it."""
    if allocator is None or not steps:
        return [(UNKNOWN, UNKNOWN)] * len(steps)
    records = list(allocator.iter_records(steps[0].previous_ns - FRESH_NS, steps[-1].end_ns))
    is_exact = allocator.header.get("peaks") == "window"
    times = [record[_TIME] for record in records]
    # After counted steps the peak of all of them is read at the end of the last one.
    readings = PeakSeries([record[_TIME] for record in records if record[_EDGE] != TICK], [])
    found = []
    for column, peak_column in ((_ALLOCATED, _ALLOCATED_PEAK), (_RESERVED, _RESERVED_PEAK)):
        sampled = PeakSeries(times, [record[column] for record in records])
        peaks = PeakSeries(times, [record[peak_column] for record in records])
        # The first reading's peak, at the begin of a phase, covers all the process's life before.
        first = allocator.segments[0]
        if is_exact and times and first.number == 0 and times[0] == first.first_ns and records[0][_EDGE] == BEGIN:
            peaks.values[0] = sampled.values[0]
        found.append(
            [
                max(sampled.find_highest(step), _find_peak(peaks, step, is_exact=is_exact))
                if not step.counted or readings.has_values(step)
                else UNKNOWN
                for step in steps
            ]
        )
    return list(zip(*found, strict=True))


def _find_peak(peaks: PeakSeries, step: FoldedStep, *, is_exact: bool) -> int:
    if not is_exact:
        return peaks.find_rise(step)
    return peaks.find_highest(step) if peaks.has_values(step) else UNKNOWN


def read_series(tables: Sequence[TableFiles], column: str, begin_ns: int, until_ns: int) -> dict[int, PeakSeries]:
    """Return a column of sampled tables, by process id."""
    found: dict[int, PeakSeries] = {}
    for table in tables:
        names = [field.name for field in table.table.fields]
        time, pid, value = (names.index(name) for name in ("time_ns", "pid", column))
        for record in table.iter_records(begin_ns - FRESH_NS, until_ns):
            series = found.setdefault(record[pid], PeakSeries([], []))
            series.times.append(record[time])
            series.values.append(record[value])
    if len(tables) > 1:
        for pid, series in found.items():
            pairs = sorted(zip(series.times, series.values, strict=True), key=lambda pair: pair[0])
            found[pid] = PeakSeries([time for time, _ in pairs], [value for _, value in pairs])
    return found
