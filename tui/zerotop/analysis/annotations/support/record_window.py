"""Records up to a cursor, of which only what is asked for is read: a window, or what is new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.session.reader import Source
from zerotop_probe.recording.tables import TABLES

Rows = NDArray[Any]
Ints = NDArray[np.int64]

# Records that are looked back through for the last one of a process or GPU: minutes, with a few ranks.
_LOOK_BACK = 4096
# Records of a writer that are looked through for the first one before that many are.
_LOOK_AHEAD = 64


@dataclass(eq=False)
class Samples:
    """Some records of a table and their times in unix nanoseconds, in order."""

    times: Ints
    rows: Rows

    def clip_window(self, begin_ns: int, end_ns: int) -> Samples:
        """Those after the begin and up to the end."""
        low, high = np.searchsorted(self.times, (begin_ns, end_ns), "right")
        return Samples(self.times[low:high], self.rows[low:high])

    def select_rows(self, chosen: NDArray[np.bool_]) -> Samples:
        """Those chosen."""
        return Samples(self.times[chosen], self.rows[chosen])

    def __len__(self) -> int:
        return len(self.times)


@dataclass
class Cursor:
    """Up to when a recording may be read (unix nanoseconds)."""

    time_ns: int = 0


class Records:
    """All records of some writers up to the cursor, or those in which a column has a value."""

    def __init__(self, cursor: Cursor, sources: Callable[[], Sequence[Source]], column: str = "", value: int = 0) -> None:
        self._cursor = cursor
        self._sources = sources
        self._column, self._value = column, value

    def read_window(self, begin_ns: int, end_ns: int) -> Samples:
        """Those after the begin and up to the end."""
        end_ns = min(end_ns, self._cursor.time_ns)
        return self._merge_parts([(one, one.count_until(begin_ns), one.count_until(end_ns)) for one in self._sources()])

    def read_last(self, time_ns: int) -> Any:
        """The last one up to a moment; None where there is none, or it is long ago."""
        time_ns = min(time_ns, self._cursor.time_ns)
        ends = [(one, one.count_until(time_ns)) for one in self._sources()]
        found = self._merge_parts([(one, max(0, end - _LOOK_BACK), end) for one, end in ends])
        return found.rows[-1] if len(found) else None

    def read_first(self) -> Samples:
        """The first one, or none."""
        found = self._merge_parts([self._find_head(one) for one in self._sources()])
        return Samples(found.times[:1], found.rows[:1])

    def _find_head(self, source: Source) -> tuple[Source, int, int]:
        """So much of a writer's records that its first one is among them, if it has one."""
        known = source.count_until(self._cursor.time_ns)
        near = min(_LOOK_AHEAD, known)
        has_one = not self._column or bool((source.array[self._column][:near] == self._value).any())
        return source, 0, near if has_one else min(_LOOK_BACK, known)

    def read_new(self, counts: dict[Source, int]) -> Samples:
        """Those beyond so many records of each writer; ``counts`` is brought up to date."""
        parts = []
        for source in self._sources():
            end = source.count_until(self._cursor.time_ns)
            parts.append((source, counts.get(source, 0), end))
            counts[source] = end
        return self._merge_parts(parts)

    def _merge_parts(self, parts: Sequence[tuple[Source, int, int]]) -> Samples:
        """Records from a place to another of each writer, in order of time."""
        found = [self._read_part(*part) for part in parts if part[1] < part[2]]
        if not found:
            return Samples(np.empty(0, np.int64), np.empty(0, np.int64))
        if len(found) == 1:
            return found[0]
        times = np.concatenate([part.times for part in found])
        order = np.argsort(times, kind="stable")
        return Samples(times[order], np.concatenate([part.rows for part in found])[order])

    def _read_part(self, source: Source, begin: int, end: int) -> Samples:
        rows = source.array[begin:end]
        if self._column:
            rows = rows[rows[self._column] == self._value]
        return Samples(rows[TABLES[source.table].time_column] + source.offset_ns, rows)
