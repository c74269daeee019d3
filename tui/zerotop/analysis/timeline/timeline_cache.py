"""Caches columns of time in blocks; merges long columns from short ones, so that each record is read once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from zerotop.recording.samples import Floats, Ints

BLOCK_COLUMNS = 256  # columns read at once
_MOST_BLOCKS = 512  # of one source
_MOST_BASE_COLUMNS = 100_000
# Columns beyond the end are read too: they stay valid until more is recorded.
_COLUMNS_AHEAD = 64


class ColumnSource(Protocol):
    """Reads columns of time from a recording."""

    def count_records(self) -> int:
        """Return how many records there are: columns stay valid until there are more."""

    def find_final_ns(self) -> int:
        """Return the moment up to which later records change nothing."""

    def choose_base(self, column_ns: int) -> int:
        """Return the length of the columns to merge into columns of this length; ``column_ns`` to read records."""

    def read_columns(self, edges: Ints) -> Floats:
        """Return the columns between the edges (unix nanoseconds), along the last axis."""

    def merge_columns(self, table: Floats, factor: int) -> Floats:
        """Merge each ``factor`` columns into one."""

    def make_blank(self, columns: int) -> Floats:
        """Return columns without values."""


@dataclass
class _CachedBlock:
    table: Floats
    record_count: int  # of the source when the block was read
    columns_read: int  # this many are read, from the first on,
    columns_final: int  # and this many will not change


class ColumnCache:
    """The columns of one source, numbered from a moment in unix time."""

    def __init__(self, source: ColumnSource, origin_ns: int) -> None:
        self._source, self._origin_ns = source, origin_ns
        self._blocks: dict[tuple[int, int], _CachedBlock] = {}
        self.is_complete = True
        """Whether all columns of the last request could be read in time."""

    def get_columns(self, column_ns: int, first: int, count: int, *, end_ns: int, until_s: float) -> Floats:
        """Return ``count`` columns from number ``first`` on.

        Columns after ``end_ns`` are blank, and those that could not be read before ``until_s`` (``time.perf_counter``).
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
        """Return a block; ``last`` is the last one of the request."""
        record_count, end = self._source.count_records(), self._count_begun(column_ns, end_ns)
        cached = self._blocks.pop((column_ns, index), None)
        if cached is not None:
            self._blocks[column_ns, index] = cached  # now the most recently used
            is_read = cached.record_count == record_count and cached.columns_read >= _count_within(index, end)
            if is_read or cached.columns_final == BLOCK_COLUMNS:
                return cached.table
        if time.perf_counter() > until_s:
            self.is_complete = False
            return cached.table if cached is not None else self._source.make_blank(BLOCK_COLUMNS)
        was_complete, self.is_complete = self.is_complete, True
        base = self._source.choose_base(column_ns)
        if self._count_begun(base, end_ns) > max(record_count, _MOST_BASE_COLUMNS):  # most of them would be blank
            base = column_ns
        if base != column_ns:
            tables = [self._merge_block(column_ns, base, index, end_ns, until_s)]
        else:  # columns that were not final are read again, together with those of the next block
            end += _COLUMNS_AHEAD
            tables = self._read_blocks(column_ns, index, index if cached is None else min(index + 1, last), cached, end)
        if self.is_complete:
            final = min(end, (self._source.find_final_ns() - self._origin_ns) // column_ns)
            for number, table in enumerate(tables, index):
                counts = _count_within(number, end), _count_within(number, final)
                self._keep_block(column_ns, number, _CachedBlock(table, record_count, *counts))
        self.is_complete &= was_complete
        return tables[0]

    def _merge_block(self, column_ns: int, base: int, index: int, end_ns: int, until_s: float) -> Floats:
        factor = column_ns // base
        table = self._collect_columns(base, index * BLOCK_COLUMNS * factor, BLOCK_COLUMNS * factor, end_ns, until_s)
        return self._source.merge_columns(table, factor)

    def _read_blocks(self, column_ns: int, first: int, last: int, cached: _CachedBlock | None, end: int) -> list[Floats]:
        """Read blocks from records up to column ``end``, except the final columns of the first one."""
        done = cached.columns_final if cached is not None else 0
        begin, blocks_end = first * BLOCK_COLUMNS + done, (last + 1) * BLOCK_COLUMNS
        end = max(begin + 1, min(end, blocks_end))
        fresh = self._source.read_columns(self._origin_ns + column_ns * np.arange(begin, end + 1, dtype=np.int64))
        tables = [fresh, self._source.make_blank(blocks_end - end)]
        if cached is not None and done:
            tables.insert(0, cached.table[..., :done])
        whole = np.concatenate(tables, axis=-1)
        return [whole[..., column : column + BLOCK_COLUMNS] for column in range(0, whole.shape[-1], BLOCK_COLUMNS)]

    def _count_begun(self, column_ns: int, end_ns: int) -> int:
        """Return how many columns have begun at a moment."""
        return (end_ns - self._origin_ns) // column_ns + 1

    def _keep_block(self, column_ns: int, index: int, block: _CachedBlock) -> None:
        self._blocks[column_ns, index] = block
        while len(self._blocks) > _MOST_BLOCKS:
            del self._blocks[next(iter(self._blocks))]


def _count_within(index: int, columns: int) -> int:
    """Return how many of the first ``columns`` columns are in a block."""
    return max(0, min(BLOCK_COLUMNS, columns - index * BLOCK_COLUMNS))
