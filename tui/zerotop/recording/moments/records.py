"""Records up to a cursor, read by time window or as they are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zerotop.recording.samples import Samples
from zerotop.recording.table_files import Source

# How many of each writer's records are searched for the last one of a process or GPU: minutes, with a few ranks.
_LOOK_BACK = 4096
# How many are searched for the first one, before _LOOK_BACK are searched.
_LOOK_AHEAD = 64


class Records:
    """All records of some writers up to the cursor, or only those with ``value`` in ``column``."""

    def __init__(self, cursor_ns: int, sources: Sequence[Source], column: str = "", value: int = 0) -> None:
        self._cursor_ns = cursor_ns
        self._sources = sources
        self._column, self._value = column, value

    def read_window(self, begin_ns: int, end_ns: int) -> Samples:
        """Return the records after ``begin_ns`` and up to ``end_ns``."""
        end_ns = min(end_ns, self._cursor_ns)
        return self._merge_parts([(one, one.count_until(begin_ns), one.count_until(end_ns)) for one in self._sources])

    def read_last(self, time_ns: int) -> Any:
        """Return the last record up to a time; None if there is none among the last _LOOK_BACK of each writer."""
        time_ns = min(time_ns, self._cursor_ns)
        ends = [(one, one.count_until(time_ns)) for one in self._sources]
        samples = self._merge_parts([(one, max(0, end - _LOOK_BACK), end) for one, end in ends])
        return samples.rows[-1] if len(samples) else None

    def read_first(self) -> Samples:
        """Return the first record, or no record if there are none."""
        samples = self._merge_parts([self._find_head(one) for one in self._sources])
        return Samples(samples.times[:1], samples.rows[:1])

    def _find_head(self, source: Source) -> tuple[Source, int, int]:
        """Return a writer, and a range of its records that contains its first matching one, if there is one."""
        count = source.count_until(self._cursor_ns)
        near = min(_LOOK_AHEAD, count)
        has_match = not self._column or bool((source.array[self._column][:near] == self._value).any())
        return source, 0, near if has_match else min(_LOOK_BACK, count)

    @property
    def selection(self) -> tuple[str, int]:
        """The column, and the value in it, of the records."""
        return self._column, self._value

    def read_new(self, counts: dict[Source, int], before_ns: int = 0, rows_before: int = 0) -> Samples:
        """Return each writer's records after its count in ``counts``, and update the counts.

        ``before_ns``, ``rows_before``: with those of so long a time, or so many, before a writer's first new record.
        """
        parts = []
        for source in self._sources:
            begin, end = counts.get(source, 0), source.count_until(self._cursor_ns)
            counts[source] = max(begin, end)
            if before_ns and begin < end:
                first_ns = int(source.unix_times(source.array[begin : begin + 1])[0])
                begin = min(begin, source.count_until(first_ns - before_ns))
            begin = max(0, begin - rows_before) if begin < end else begin
            parts.append((source, begin, end))
        return self._merge_parts(parts)

    def _merge_parts(self, ranges: Sequence[tuple[Source, int, int]]) -> Samples:
        """Return a range of each writer's records, merged in order of time."""
        parts = [self._read_part(*bounds) for bounds in ranges if bounds[1] < bounds[2]]
        if not parts:
            return Samples(np.empty(0, np.int64), np.empty(0, np.int64))
        if len(parts) == 1:
            return parts[0]
        times = np.concatenate([part.times for part in parts])
        order = np.argsort(times, kind="stable")
        return Samples(times[order], np.concatenate([part.rows for part in parts])[order])

    def _read_part(self, source: Source, begin: int, end: int) -> Samples:
        rows = source.array[begin:end]
        if self._column:
            rows = rows.compress(rows[self._column] == self._value)
        return Samples(source.unix_times(rows), rows)
