"""Choose the lines of a ledger to show if not all of them fit."""

from __future__ import annotations

from collections.abc import Sequence

from zerotop.analysis.formatting import format_count
from zerotop.analysis.memory.host_ledger import WORKERS
from zerotop.analysis.memory.memory_table import SUM_DEVICE, SUM_RESIDENT, MemoryLine

EXTRA_KEYS = ("estimate", "rule", WORKERS)
"""Lines after the ledger that do not count in its sums."""
_LAST_SUMS = (SUM_DEVICE, SUM_RESIDENT)


def choose_lines(lines: Sequence[MemoryLine], room: int) -> list[MemoryLine]:
    """Return at most ``room`` lines in their order.

    Tiny lines are dropped first, then extra lines, then sums except the last one. One line stands for all dropped parts, so
    that the others still add up: before the first sum that holds them all.
    """
    chosen = list(lines)
    largest = max((line.now_bytes for line in lines), default=0)

    def rate_line(line: MemoryLine) -> tuple[int, int]:
        size = max(abs(line.now_bytes), line.peak_bytes or 0, line.expected_bytes or 0)
        if line.key in _LAST_SUMS:
            return 9, size
        if line.is_sum:
            return 3, size
        if line.key in EXTRA_KEYS:
            return 2, size
        return (1 if size < largest / 1000 else 4), size

    room = max(0, room)
    while len(chosen) > room:
        chosen.remove(min(chosen, key=rate_line))
    if any(_is_part(line) and line not in chosen for line in lines):
        while len(chosen) > max(0, room - 1):
            chosen.remove(min(chosen, key=rate_line))
        dropped = [index for index, line in enumerate(lines) if _is_part(line) and line not in chosen]
        sums = [line for line in lines[dropped[0] :] if line.is_sum and line in chosen]
        if sums:
            holds_all = next((line for line in lines[dropped[-1] :] if line in sums), sums[-1])
            place = chosen.index(holds_all if holds_all is sums[0] else sums[-1])
            chosen.insert(place, _merge_lines([lines[index] for index in dropped]))
    return chosen


def _is_part(line: MemoryLine) -> bool:
    return not line.is_sum and line.key not in EXTRA_KEYS


def _merge_lines(lines: Sequence[MemoryLine]) -> MemoryLine:
    peaks = [line.peak_bytes for line in lines if line.peak_bytes is not None]
    return MemoryLine(
        "", format_count(len(lines), "other"), sum(line.now_bytes for line in lines), sum(peaks) if peaks else None
    )
