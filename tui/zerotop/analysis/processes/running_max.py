"""Running maxima up to any cursor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.moments.moment import keep
from zerotop.recording.table_files import Source

_BLOCK_ROWS = 4096  # records between cached maxima: the most that a cursor anywhere has to read
_FEW_ROWS = 32  # up to which a plain loop is faster

_Highest = Mapping[int, tuple[int, ...]]


class _Maxima:
    """The maxima up to each whole block of a table's records, and up to the last cursor, by columns."""

    def __init__(self) -> None:
        self.block_peaks: dict[tuple[str, ...], list[_Highest]] = {}
        self.last_peaks: dict[tuple[str, ...], tuple[int, _Highest]] = {}


def find_peaks(source: Source, columns: tuple[str, ...], cursor_ns: int, *, by: str) -> _Highest:
    """Return the highest values of integer columns up to the cursor, for each value of the column ``by``.

    After one pass, any cursor reads one block, and an advancing one only new records.
    """
    count, maxima = source.count_until(cursor_ns), keep(source, _Maxima)
    before = maxima.block_peaks.setdefault(columns, [{}])
    fresh = range((len(before) - 1) * _BLOCK_ROWS, count - _BLOCK_ROWS + 1, _BLOCK_ROWS)
    for begin in fresh:
        before.append(_raise_peaks(before[-1], source.array[begin : begin + _BLOCK_ROWS], columns, by))
    if len(fresh) > 1:
        source.release_memory()
    begin, highest = maxima.last_peaks.get(columns, (0, {}))
    if not count - _BLOCK_ROWS < begin <= count:
        begin, highest = count // _BLOCK_ROWS * _BLOCK_ROWS, before[count // _BLOCK_ROWS]
    highest = _raise_peaks(highest, source.array[begin:count], columns, by) if begin < count else highest
    maxima.last_peaks[columns] = count, highest
    return highest


def _raise_peaks(highest: _Highest, rows: NDArray[Any], columns: tuple[str, ...], by: str) -> _Highest:
    """Return a copy of ``highest`` raised by ``rows``."""
    if len(rows) <= _FEW_ROWS:
        raised = dict(highest)
        for key, *values in zip(rows[by].tolist(), *(rows[name].tolist() for name in columns), strict=True):
            raised[key] = _find_higher(raised.get(key), tuple(values))
        return raised
    # Copied, because the code below reads each column several times, and its records exceed the processor's cache.
    keys, *values = (np.ascontiguousarray(rows[name]) for name in (by, *columns))
    raised = dict(highest)
    for key, own in _find_places(keys):
        raised[key] = _find_higher(raised.get(key), tuple(int(column[own].max()) for column in values))
    return raised


def _find_places(keys: NDArray[Any]) -> list[tuple[int, Any]]:
    """Return keys and where they are, as an index; a key may appear twice."""
    period = int(np.append(keys[1:] == keys[0], True).argmax()) + 1
    if (keys[period:] == keys[:-period]).all():  # at each of its ticks a sampler writes the same processes
        return [(key, slice(place, None, period)) for place, key in enumerate(keys[:period].tolist())]
    return [(key, keys == key) for key in np.unique(keys).tolist()]


def _find_higher(before: tuple[int, ...] | None, values: tuple[int, ...]) -> tuple[int, ...]:
    return values if before is None else tuple(map(max, before, values))
