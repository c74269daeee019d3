"""Check records when they are first read, so that analysis can rely on their order.

A crash of the machine leaves ranges of zeros, and a failing disk leaves anything. A record counts as damaged if its time is
impossible or far out of order, if it ends before it begins, or if a value is beyond what any machine has. Reading the times
of a gigabyte of records takes 0.1 s, and all values as long again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.value_limits import limit_values
from zerotop_probe.recording.tables import OUTPUT, Table

Rows = NDArray[Any]
Mask = NDArray[np.bool_]

MAX_AGE_NS = 10 * 366 * 86_400 * 10**9
"""No recording spans more time than this."""

# A phase may have begun before its rank began to record, but not longer ago.
_EARLIEST_NS = 86_400 * 10**9
# Nor this long before the begin of the first one that ended.
_EARLIER_NS = 6 * 3_600 * 10**9

# Threads of a rank write in turn, each a little after it read the clock.
TOLERANCE_NS = 10 * 10**9
"""How far records may be out of order."""
_CHUNK_ROWS = 1 << 15  # a chunk of times fits into the processor's cache
_MAX_PASSES = 4
# No value of 64 bits exceeds this, so that the sum of two fits.
_MAX_VALUE = 1 << 62


class RecordCheck:
    """Finds the damaged records of one table's file; records are passed in order."""

    def __init__(self, table: Table, created_ns: int, *, has_older: bool = False) -> None:
        """``created_ns``: when the file was created, on the clock of its records; ``has_older``: whether some are older."""
        self._table = table
        self._limits = limit_values(table)
        self._may_be_zero = created_ns < TOLERANCE_NS
        self._lowest_ns = max(created_ns - (MAX_AGE_NS if has_older else _EARLIEST_NS), 0)
        self._highest_ns = created_ns + MAX_AGE_NS
        self._newest_ns = self._lowest_ns
        self._lowest_begin_ns = self._lowest_ns
        self._last: Rows | None = None  # the last record that is whole

    def is_possible(self, time_ns: int) -> bool:
        """Whether a record can be of this time at all."""
        return max(self._lowest_ns, not self._may_be_zero) <= time_ns <= self._highest_ns

    def find_damaged(self, rows: Rows) -> Mask | None:
        """Return which of the next records are damaged, shape (n,); None if there are none."""
        if len(rows) == 0:
            return None
        newest_ns, last = self._newest_ns, rows[:0] if self._last is None else self._last
        for begin in range(0, len(rows), _CHUNK_ROWS):
            chunk = rows[begin : begin + _CHUNK_ROWS]
            times = np.ascontiguousarray(chunk[self._table.time_column])
            lowest_ns = int(times.min())
            in_order = times[0] >= newest_ns - TOLERANCE_NS and _is_ordered(times)
            newest_ns = max(newest_ns, int(times.max()))
            if not in_order or lowest_ns < self._lowest_ns or newest_ns > self._highest_ns:
                break
            if lowest_ns == 0 and not self._may_be_zero:
                break
            if self._find_invalid_values(chunk, times, last) is not None:
                break
            last = chunk[-1:]
        else:
            self._newest_ns, self._last = newest_ns, last.copy()
            return None
        damaged = self._mark_damaged(rows)
        self._last = rows[~damaged][-1:].copy() if not damaged.all() else self._last
        whole = rows[self._table.time_column][~damaged]
        self._newest_ns = max(self._newest_ns, int(whole.max(initial=self._lowest_ns)))
        return damaged

    def _find_invalid_values(self, rows: Rows, times: NDArray[np.int64], before: Rows) -> Mask | None:
        """Return which records contradict themselves, or the record ``before`` them; None if none do."""
        invalid = self._limits.find_impossible(rows, before)
        names = rows.dtype.names or ()
        if "begin_ns" in names:
            begins = rows["begin_ns"]
            if self._last is None and not invalid[0] and begins[0] <= times[0]:
                self._lowest_begin_ns = max(self._lowest_ns, int(begins[0]) - _EARLIER_NS)
            invalid |= (begins > times) | (begins < self._lowest_begin_ns)
        elif self._table is OUTPUT:
            invalid |= (rows["offset"] < 0) | (rows["offset"] > _MAX_VALUE) | (rows["length"] < 0)
        return invalid if invalid.any() else None

    def _mark_damaged(self, rows: Rows) -> Mask:
        times = np.ascontiguousarray(rows[self._table.time_column])
        damaged: Mask = (times < self._lowest_ns) | (times > self._highest_ns)
        if not self._may_be_zero and int(times.max(initial=0, where=~damaged)) not in range(1, TOLERANCE_NS):
            damaged |= times == 0  # records that were never written
        invalid = self._find_invalid_values(rows, times, rows[:0] if self._last is None else self._last)
        if invalid is not None:
            damaged |= invalid
        for _ in range(_MAX_PASSES):
            kept = np.flatnonzero(~damaged)
            behind, ahead = _find_unordered(times[kept], self._newest_ns)
            if not behind.any():
                break
            # One record from the future makes all later ones late: the minority is damaged.
            damaged[kept[ahead if 0 < ahead.sum() < behind.sum() else behind]] = True
        else:
            kept = np.flatnonzero(~damaged)
            damaged[kept[_find_unordered(times[kept], self._newest_ns)[0]]] = True
        return damaged


def pass_whole(checks: Sequence[RecordCheck], before: Rows, rows: Rows, counts: Sequence[int], pause_ns: int) -> list[bool]:
    """Return of which files of one table the next records are certainly whole, so that they need not be passed again.

    ``before``: the last record of each file, all of which were whole. ``rows``: the next records of all files, ``counts`` of
    each; those of a file that goes on after a pause of about ``pause_ns`` are not certain.
    """
    limits, time_column = checks[0]._limits, checks[0]._table.time_column
    if checks[0]._table is OUTPUT:
        return [False] * len(checks)
    suspects = limits.find_suspects(rows, before, counts)
    times = np.ascontiguousarray(rows[time_column])
    bounds = np.array([(one._lowest_ns, one._highest_ns, one._newest_ns, one._lowest_begin_ns) for one in checks])
    lowest_ns, highest_ns, newest_ns, lowest_begin_ns = bounds.T
    if "begin_ns" in (rows.dtype.names or ()):
        suspects |= (rows["begin_ns"] > times) | (rows["begin_ns"] < lowest_begin_ns.repeat(counts))
    begins = np.cumsum(counts, dtype=np.int64) - np.array(counts)
    oldest_ns, latest_ns = np.minimum.reduceat(times, begins), np.maximum.reduceat(times, begins)
    are_whole = latest_ns - before[time_column] <= pause_ns - TOLERANCE_NS
    newest_ns = np.maximum(newest_ns, latest_ns)
    are_whole &= (
        (oldest_ns >= np.maximum(lowest_ns, 1)) & (latest_ns <= highest_ns) & (oldest_ns >= newest_ns - TOLERANCE_NS)
    )
    are_whole &= ~np.logical_or.reduceat(suspects, begins)
    for one, begin, count, newest, is_whole in zip(checks, begins, counts, newest_ns.tolist(), are_whole, strict=True):
        if is_whole:
            one._newest_ns, one._last = newest, rows[begin + count - 1 : begin + count].copy()
    found: list[bool] = are_whole.tolist()
    return found


def join_rows(pieces: Sequence[Rows]) -> Rows:
    """Return records of one dtype in one array; np.concatenate copies field by field, which takes thirty times longer."""
    return np.frombuffer(b"".join([piece.tobytes() for piece in pieces]), pieces[0].dtype)


def _is_ordered(times: NDArray[np.int64]) -> bool:
    ascending = (times[1:] >= times[:-1]).all()
    return bool(ascending or (times >= np.maximum.accumulate(times) - TOLERANCE_NS).all())


class _Disorder(NamedTuple):
    behind: Mask  # records older than an earlier one
    ahead: Mask  # records newer than a later one


def _find_unordered(times: NDArray[np.int64], newest_ns: int) -> _Disorder:
    if not len(times):
        return _Disorder(np.zeros(0, np.bool_), np.zeros(0, np.bool_))
    behind = times < np.maximum(np.maximum.accumulate(times), newest_ns) - TOLERANCE_NS
    ahead = times > np.minimum.accumulate(times[::-1])[::-1] + TOLERANCE_NS
    return _Disorder(behind, ahead)
