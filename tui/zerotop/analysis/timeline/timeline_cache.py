"""Columns that were told once are kept, in blocks; long ones are made of shorter ones, so that a recording is read once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from zerotop.analysis.timeline.resample import Floats, Ints

BLOCK = 256  # columns told at once
_KEPT = 512  # blocks of one teller
_AHEAD = 64  # columns that have not begun are told too: while nothing more is recorded, what is told stays good for them


class Teller(Protocol):
    """Tells columns of time from a recording."""

    def count(self) -> int:
        """How much is recorded: while it stays, so does what is told."""

    def final_ns(self) -> int:
        """Up to which moment nothing will change any more, whatever is recorded yet."""

    def base(self, column_ns: int) -> int:
        """Of columns of which length such a column is made; the same where it is told from records."""

    def tell(self, edges: Ints) -> Floats:
        """The columns between the edges (unix nanoseconds), along the last axis."""

    def join(self, table: Floats, factor: int) -> Floats:
        """What columns come to as columns of ``factor`` times their length."""

    def blank(self, columns: int) -> Floats:
        """Columns of which nothing is known."""


@dataclass
class _Block:
    table: Floats
    count: int  # what was recorded when it was told
    told: int  # so many of its columns were
    final: int  # so many of its columns will not change


class Blocks:
    """The columns of one teller, counted from a moment."""

    def __init__(self, teller: Teller, origin_ns: int) -> None:
        self._teller, self._origin_ns = teller, origin_ns
        self._kept: dict[tuple[int, int], _Block] = {}
        self.complete = True
        """Whether the last ones asked for could all be told in time."""

    def columns(self, column_ns: int, first: int, count: int, *, end_ns: int, until_s: float) -> Floats:
        """``count`` columns from the one numbered ``first`` on.

        Nothing is known after ``end_ns``; what could not be told before ``until_s`` (of ``time.perf_counter``) is blank.
        """
        self.complete = True
        return self._columns(column_ns, first, count, end_ns, until_s)

    def _columns(self, column_ns: int, first: int, count: int, end_ns: int, until_s: float) -> Floats:
        low, high = max(first, 0), min(first + count, self._beyond(column_ns, end_ns))
        if high <= low:
            return self._teller.blank(count)
        blocks = range(low // BLOCK, (high - 1) // BLOCK + 1)
        tables = [self._block(column_ns, index, blocks[-1], end_ns, until_s) for index in blocks]
        tables[-1] = tables[-1][..., : high - blocks[-1] * BLOCK]
        tables[0] = tables[0][..., low - blocks[0] * BLOCK :]
        if low > first:
            tables.insert(0, self._teller.blank(low - first))
        if high < first + count:
            tables.append(self._teller.blank(first + count - high))
        return np.concatenate(tables, axis=-1)

    def _block(self, column_ns: int, index: int, last: int, end_ns: int, until_s: float) -> Floats:
        """A block; ``last`` is the last one that is wanted."""
        kept = self._kept.pop((column_ns, index), None)
        if kept is not None and kept.final == BLOCK:
            self._kept[column_ns, index] = kept
            return kept.table
        number, beyond = self._teller.count(), self._beyond(column_ns, end_ns)
        if kept is not None and kept.count == number and kept.told >= _within(index, beyond):
            self._kept[column_ns, index] = kept
            return kept.table
        if time.perf_counter() > until_s:
            self.complete = False
            if kept is not None:
                self._kept[column_ns, index] = kept
                return kept.table
            return self._teller.blank(BLOCK)
        was_complete, self.complete = self.complete, True
        base = self._teller.base(column_ns)
        if base != column_ns:
            tables = [self._joined(column_ns, base, index, end_ns, until_s)]
        else:  # what was not final is told again, beyond this block's end in the same go
            beyond += _AHEAD
            tables = self._told(column_ns, index, index if kept is None else min(index + 1, last), kept, beyond)
        if self.complete:
            final = min(beyond, (self._teller.final_ns() - self._origin_ns) // column_ns)
            for place, table in enumerate(tables, index):
                self._keep(column_ns, place, _Block(table, number, *(_within(place, upto) for upto in (beyond, final))))
        self.complete &= was_complete
        return tables[0]

    def _joined(self, column_ns: int, base: int, index: int, end_ns: int, until_s: float) -> Floats:
        factor = column_ns // base
        table = self._columns(base, index * BLOCK * factor, BLOCK * factor, end_ns, until_s)
        return self._teller.join(table, factor)

    def _told(self, column_ns: int, first: int, last: int, kept: _Block | None, beyond: int) -> list[Floats]:
        """Blocks from records, from the one on of which some may be kept, up to the column numbered ``beyond``."""
        done = kept.final if kept is not None else 0
        begin, end = first * BLOCK + done, (last + 1) * BLOCK
        beyond = max(begin + 1, min(beyond, end))
        fresh = self._teller.tell(self._origin_ns + column_ns * np.arange(begin, beyond + 1, dtype=np.int64))
        tables = [fresh, self._teller.blank(end - beyond)]
        if kept is not None and done:
            tables.insert(0, kept.table[..., :done])
        whole = np.concatenate(tables, axis=-1)
        return [whole[..., place : place + BLOCK] for place in range(0, whole.shape[-1], BLOCK)]

    def _beyond(self, column_ns: int, end_ns: int) -> int:
        """How many columns have begun by then."""
        return (end_ns - self._origin_ns) // column_ns + 1

    def _keep(self, column_ns: int, index: int, block: _Block) -> None:
        self._kept[column_ns, index] = block
        while len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]


def _within(index: int, columns: int) -> int:
    """How many of the first so many columns lie in a block."""
    return max(0, min(BLOCK, columns - index * BLOCK))
