"""Running maxima up to any cursor."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.session.reader import Source

_BLOCK_ROWS = 4096  # records between cached maxima: the most that a cursor anywhere has to read
_FEW_ROWS = 32  # up to which a plain loop is faster


class Peaks:
    """Running maxima of columns. After one pass, a cursor anywhere reads a block, and an advancing one only new records."""

    def __init__(self) -> None:
        self._block_peaks: dict[tuple[Source, str], list[dict[int, int]]] = {}
        self._last_peaks: dict[tuple[Source, str], tuple[int, dict[int, int]]] = {}

    def peaks_until(self, source: Source, column: str, cursor_ns: int, *, by: str) -> dict[int, int]:
        """Return the highest value of an integer column up to the cursor, for each value of the column ``by``."""
        count = source.count_until(cursor_ns)
        before = self._block_peaks.setdefault((source, column), [{}])
        fresh = range((len(before) - 1) * _BLOCK_ROWS, count - _BLOCK_ROWS + 1, _BLOCK_ROWS)
        for begin in fresh:
            before.append(_raise_peaks(before[-1], source.array[begin : begin + _BLOCK_ROWS], column, by))
        if len(fresh) > 1:
            source.release_memory()
        begin, highest = self._last_peaks.get((source, column), (0, {}))
        if not count - _BLOCK_ROWS < begin <= count:
            begin, highest = count // _BLOCK_ROWS * _BLOCK_ROWS, before[count // _BLOCK_ROWS]
        highest = _raise_peaks(highest, source.array[begin:count], column, by) if begin < count else highest
        self._last_peaks[source, column] = count, highest
        return highest


def _raise_peaks(highest: dict[int, int], rows: NDArray[Any], column: str, by: str) -> dict[int, int]:
    """Return a copy of ``highest`` raised by ``rows``."""
    raised = dict(highest)
    keys, values = rows[by], rows[column]
    if len(rows) <= _FEW_ROWS:
        for key, value in zip(keys.tolist(), values.tolist(), strict=True):
            raised[key] = max(raised.get(key, value), value)
        return raised
    only = int(keys[0])
    if (keys == only).all():
        value = int(values.max())
        return raised | {only: max(raised.get(only, value), value)}
    for key in np.unique(keys).tolist():
        value = int(values[keys == key].max())
        raised[key] = max(raised.get(key, value), value)
    return raised
