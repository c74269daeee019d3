"""Columns that were told once are kept, in blocks; long ones are made of shorter ones, so that a recording is read once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from zerotop.session.samples import Floats, Ints

BLOCK_COLUMNS = 256  # columns told at once
_MOST_BLOCKS = 512  # blocks of one teller
_COLUMNS_AHEAD = (
    64  # columns that have not begun are told too: while nothing more is recorded, what is told stays good for them
)


class ColumnSource(Protocol):
    """Tells columns of time from a recording."""

    def count_records(self) -> int:
        """How much is recorded: while it stays, so does what is told."""

    def find_final_ns(self) -> int:
        """Up to which moment nothing will change any more, whatever is recorded yet."""

    def choose_base(self, column_ns: int) -> int:
        """Of columns of which length such a column is made; the same where it is told from records."""

    def read_columns(self, edges: Ints) -> Floats:
        """The columns between the edges (unix nanoseconds), along the last axis."""

    def merge_columns(self, table: Floats, factor: int) -> Floats:
        """What columns come to as columns of ``factor`` times their length."""

    def make_blank(self, columns: int) -> Floats:
        """Columns of which nothing is known."""


@dataclass
class _CachedBlock:
    table: Floats
    record_count: int  # what was recorded when it was told
    columns_read: int  # so many of its columns were
    columns_final: int  # so many of its columns will not change


class ColumnCache:
    """The columns of one teller, counted from a moment."""

    def __init__(self, source: ColumnSource, origin_ns: int) -> None:
        self._source, self._origin_ns = source, origin_ns
        self._blocks: dict[tuple[int, int], _CachedBlock] = {}
        self.is_complete = True
        """Whether the last ones asked for could all be told in time."""

    def get_columns(self, column_ns: int, first: int, count: int, *, end_ns: int, until_s: float) -> Floats:
        """``count`` columns from the one numbered ``first`` on.

        Nothing is known after ``end_ns``; what could not be told before ``until_s`` (of ``time.perf_counter``) is blank.
        """
        self.is_complete = True
        return self._collect_columns(column_ns, first, count, end_ns, until_s)

    def _collect_columns(self, column_ns: int, first: int, count: int, end_ns: int, until_s: float) -> Floats:
        low, high = max(first, 0), min(first + count, self._count_begun(column_ns, end_ns))
        if high <= low:
            return self._source.make_blank(count)
        blocks = range(low // BLOCK_COLUMNS, (high - 1) // BLOCK_COLUMNS + 1)
        tables = [self._get_block(column_ns, index, blocks[-1], end_ns, until_s) for index in blocks]
        tables[-1] = tables[-1][..., : high - blocks[-1] * BLOCK_COLUMNS]
        tables[0] = tables[0][..., low - blocks[0] * BLOCK_COLUMNS :]
        if low > first:
            tables.insert(0, self._source.make_blank(low - first))
        if high < first + count:
            tables.append(self._source.make_blank(first + count - high))
        return np.concatenate(tables, axis=-1)

    def _get_block(self, column_ns: int, index: int, last: int, end_ns: int, until_s: float) -> Floats:
        """A block; ``last`` is the last one that is wanted."""
        kept = self._blocks.pop((column_ns, index), None)
        if kept is not None and kept.columns_final == BLOCK_COLUMNS:
            self._blocks[column_ns, index] = kept
            return kept.table
        number, beyond = self._source.count_records(), self._count_begun(column_ns, end_ns)
        if kept is not None and kept.record_count == number and kept.columns_read >= _count_within(index, beyond):
            self._blocks[column_ns, index] = kept
            return kept.table
        if time.perf_counter() > until_s:
            self.is_complete = False
            if kept is not None:
                self._blocks[column_ns, index] = kept
                return kept.table
            return self._source.make_blank(BLOCK_COLUMNS)
        was_complete, self.is_complete = self.is_complete, True
        base = self._source.choose_base(column_ns)
        if base != column_ns:
            tables = [self._merge_block(column_ns, base, index, end_ns, until_s)]
        else:  # what was not final is told again, beyond this block's end in the same go
            beyond += _COLUMNS_AHEAD
            tables = self._read_blocks(column_ns, index, index if kept is None else min(index + 1, last), kept, beyond)
        if self.is_complete:
            final = min(beyond, (self._source.find_final_ns() - self._origin_ns) // column_ns)
            for place, table in enumerate(tables, index):
                self._keep_block(
                    column_ns, place, _CachedBlock(table, number, *(_count_within(place, upto) for upto in (beyond, final)))
                )
        self.is_complete &= was_complete
        return tables[0]

    def _merge_block(self, column_ns: int, base: int, index: int, end_ns: int, until_s: float) -> Floats:
        factor = column_ns // base
        table = self._collect_columns(base, index * BLOCK_COLUMNS * factor, BLOCK_COLUMNS * factor, end_ns, until_s)
        return self._source.merge_columns(table, factor)

    def _read_blocks(self, column_ns: int, first: int, last: int, cached: _CachedBlock | None, beyond: int) -> list[Floats]:
        """Blocks from records, from the one on of which some may be kept, up to the column numbered ``beyond``."""
        done = cached.columns_final if cached is not None else 0
        begin, end = first * BLOCK_COLUMNS + done, (last + 1) * BLOCK_COLUMNS
        beyond = max(begin + 1, min(beyond, end))
        fresh = self._source.read_columns(self._origin_ns + column_ns * np.arange(begin, beyond + 1, dtype=np.int64))
        tables = [fresh, self._source.make_blank(end - beyond)]
        if cached is not None and done:
            tables.insert(0, cached.table[..., :done])
        whole = np.concatenate(tables, axis=-1)
        return [whole[..., place : place + BLOCK_COLUMNS] for place in range(0, whole.shape[-1], BLOCK_COLUMNS)]

    def _count_begun(self, column_ns: int, end_ns: int) -> int:
        """How many columns have begun by then."""
        return (end_ns - self._origin_ns) // column_ns + 1

    def _keep_block(self, column_ns: int, index: int, block: _CachedBlock) -> None:
        self._blocks[column_ns, index] = block
        while len(self._blocks) > _MOST_BLOCKS:
            del self._blocks[next(iter(self._blocks))]


def _count_within(index: int, columns: int) -> int:
    """How many of the first so many columns lie in a block."""
    return max(0, min(BLOCK_COLUMNS, columns - index * BLOCK_COLUMNS))
