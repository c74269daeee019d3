"""The highest values up to a cursor, wherever it goes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.session.reader import Source

# Records between two places of which the highest before are kept: what a cursor anywhere has to read.
_BLOCK = 1024
_FEW = 32  # of which going through them one by one is faster


class Peaks:
    """The highest values of columns, read once: then a cursor anywhere costs a block, one that goes on only what is new."""

    def __init__(self) -> None:
        self._before: dict[tuple[Source, str], list[dict[int, int]]] = {}
        self._last: dict[tuple[Source, str], tuple[int, dict[int, int]]] = {}

    def upto(self, source: Source, column: str, cursor_ns: int, *, by: str) -> dict[int, int]:
        """The highest value of a column of integers up to the cursor for each value of the column ``by``."""
        count = source.count_known(cursor_ns)
        before = self._before.setdefault((source, column), [{}])
        fresh = range((len(before) - 1) * _BLOCK, count - _BLOCK + 1, _BLOCK)
        for begin in fresh:
            before.append(_raised(before[-1], source.array[begin : begin + _BLOCK], column, by))
        if len(fresh) > 1:
            source.release()
        begin, highest = self._last.get((source, column), (0, {}))
        if not count - _BLOCK < begin <= count:
            begin, highest = count // _BLOCK * _BLOCK, before[count // _BLOCK]
        highest = _raised(highest, source.array[begin:count], column, by) if begin < count else highest
        self._last[source, column] = count, highest
        return highest


def _raised(highest: dict[int, int], rows: NDArray[Any], column: str, by: str) -> dict[int, int]:
    """A copy of ``highest`` with what is higher in ``rows``."""
    raised = dict(highest)
    keys, values = rows[by], rows[column]
    if len(rows) <= _FEW:
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
