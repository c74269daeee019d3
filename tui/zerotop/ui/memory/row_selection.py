"""Which lines of a ledger are shown where there is no room for all."""

from __future__ import annotations

from collections.abc import Sequence

from zerotop.analysis.formatting import plural
from zerotop.analysis.memory.memory_table import SUM_DEVICE, SUM_RESIDENT, Line

BESIDE = ("estimate", "rule")
"""Lines after the ledger, which are no part of it."""
_LAST = (SUM_DEVICE, SUM_RESIDENT)


def that_fit(lines: Sequence[Line], room: int) -> list[Line]:
    """In their order; the last sum stays, what is hardly anything goes first, then what is beside the ledger, then sums.

    What goes is one line together, so that what is shown still adds up.
    """
    kept = list(lines)
    largest = max((line.now_bytes for line in lines), default=0)

    def importance(line: Line) -> tuple[int, int]:
        size = max(abs(line.now_bytes), line.peak_bytes or 0, line.expected_bytes or 0)
        if line.key in _LAST:
            return 9, size
        if line.is_sum:
            return 3, size
        if line.key in BESIDE:
            return 2, size
        return (1 if size < largest / 1000 else 4), size

    room = max(0, room)
    while len(kept) > room:
        kept.remove(min(kept, key=importance))
    if any(_is_part(line) and line not in kept and importance(line)[0] > 1 for line in lines):
        while len(kept) > max(0, room - 1):
            kept.remove(min(kept, key=importance))
        last = next((place for place, line in enumerate(kept) if line.key in _LAST), None)
        if last is not None:
            kept.insert(last, _together([line for line in lines if _is_part(line) and line not in kept]))
    return kept


def _is_part(line: Line) -> bool:
    return not line.is_sum and line.key not in BESIDE


def _together(lines: Sequence[Line]) -> Line:
    peaks = [line.peak_bytes for line in lines if line.peak_bytes is not None]
    return Line("", plural(len(lines), "other"), sum(line.now_bytes for line in lines), sum(peaks) if peaks else None)
