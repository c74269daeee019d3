"""The tables of a recording, complete or still growing."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.headers import parse_columns, parse_integer, parse_writer
from zerotop.recording.memory_map import release_pages
from zerotop.recording.record_check import TOLERANCE_NS, RecordCheck, pass_whole
from zerotop.recording.storage import Folder
from zerotop_probe.recording.segments import parse_name
from zerotop_probe.recording.tables import FOLDED, TABLES

_NEAR_ROWS = 64  # records before the end that are searched first,
_SEARCH_FACTOR = 8  # then this many times as many, so that pages far back need not be loaded
# Records at the end that are this much later than those before them wait until something else of the recording is as late.
LONG_PAUSE_NS = 3600 * 10**9
_LATE_ROWS = 256  # so many records are searched for a pause
_MANY_TIMES, _LONG_ENOUGH_NS = 5, 10**9  # of records after a pause, for a table that goes on
_MANY_ROWS = 10_000  # records that are not checked before they are needed,
_TAIL_ROWS = 1024  # except for this many at the end
_MANY_TABLES = 8  # tables with few new records each are checked together: so many tables,
_FEW_ROWS = 4096  # so few records: seconds of a node's GPUs


class Source:
    """A table of one writer: complete records, memory-mapped, as of the last :meth:`refresh`.

    Records are checked when they are first used. Damaged ones are left out and counted.
    """

    def __init__(self, folder: Folder, name: str, header: dict[str, Any], data_offset: int, offset_ns: int) -> None:
        stem, _ = parse_name(name) or (name, 0)
        self.path = folder.path / f"{stem}.rec"
        self._folder = folder
        self.header = header
        self.table = str(header["table"])
        self.role, self.rank, self.host, self.pid = parse_writer(header)[:4]
        self.offset_ns = offset_ns
        self.writer_name = stem.removeprefix(self.table)
        """What the names of all tables of one start of a writer end with."""
        created_ns = parse_integer(header["clock"]["monotonic_ns"])
        self.created_ns = created_ns + offset_ns
        """Unix time at which the file was created."""
        self.period_ns = parse_integer(header.get("period_ns") or 0)
        """Time between the records of coarse samples, else 0."""
        self._names: tuple[str, ...] = (name,)
        self.header_bytes = data_offset
        self._damaged_count = 0
        self.waiting_records = 0
        """Records at the end that are much later than all else, see :meth:`admit_until`."""
        self.resumed_ns: int | None = None
        """Unix time of the first of them, if they look like a table that goes on."""
        self._admitted_ns = 0
        self.is_replaced = False
        """Whether the file was replaced by one with fewer records; those that were read stay readable."""
        self.is_cut = False
        """Whether the file has lost records that were read, or was written anew."""
        self._dtype = _build_dtype(header, name)
        self._mapped_bytes: NDArray[np.uint8] | bytes = b""
        self._time_column = TABLES[self.table].time_column
        # The sampler writes these tables anew, with fewer records of old times.
        self._is_merged = self.table == FOLDED.name or self.period_ns > 0
        self._mapped_rows: NDArray[Any] = np.empty(0, self._dtype)  # up to the end of the mapping, beyond the file
        self._count = 0  # complete records in the file,
        self._tail_count = 0  # as it was when only the last of them were checked,
        self._is_tail_whole = False  # and whether those were whole
        self._checked_count = 0  # records that were checked,
        self._last_checked = b""  # the last of these,
        self._array: NDArray[Any] = self._mapped_rows  # those of them that are whole,
        self._checked_times: NDArray[np.int64] | None = None  # and their times, once they were asked for
        self._check = self._make_check()
        self._last_ns: int | None = None  # the last time, once it was read
        self.kept: dict[Any, Any] = {}
        """What has been computed of its records, see :func:`zerotop.recording.moments.moment.keep`."""
        self.is_incomplete = False
        """Whether one of its files was removed before it was read."""

    @property
    def damaged_records(self) -> int:
        """Number of records that are left out, among those read so far."""
        return self._damaged_count + self.waiting_records

    def add_segment(self, name: str) -> None:
        """Add the next file of this table."""
        self._names += (name,)

    def refresh(self) -> bool:
        """Read the records added since the last call. Return whether there were any."""
        viewed = self._view_file()
        return viewed is not None and self._take_view(*viewed)

    def _view_file(self) -> tuple[int, NDArray[np.uint8] | bytes] | None:
        """Return how many records the file has, and its bytes; None if it cannot be read."""
        try:
            size, data = self._folder.view_segments(self._names, self.header_bytes, self._dtype.itemsize)
        except OSError as error:  # the folder may be gone; mapped records stay readable
            self.is_incomplete = isinstance(error, FileNotFoundError)
            return None
        return max(0, size - self.header_bytes) // self._dtype.itemsize, data

    def _take_view(self, count: int, data: NDArray[np.uint8] | bytes) -> bool:
        """Take over what :meth:`_view_file` has returned. Return whether there are new records."""
        is_same = data is self._mapped_bytes
        if not is_same and self._is_merged and self._count:
            return False  # the sampler has merged old records; those that were read stay readable
        if count <= self._count:
            self.is_cut |= is_same and count < self._count
            self.is_replaced |= not is_same and count < self._count
            return False
        if not is_same:
            self._replace_bytes(data)
        self.waiting_records = self._count_late(count)
        is_new = count - self.waiting_records > self._count
        self._count, self._last_ns = count - self.waiting_records, None
        self.is_cut = self._last_checked != self._read_row(self._checked_count - 1)
        return is_new and not self.is_cut

    def _replace_bytes(self, data: NDArray[np.uint8] | bytes) -> None:
        """Use the bytes of longer files or, if a file was replaced, of another one."""
        room = (len(data) - self.header_bytes) // self._dtype.itemsize
        self._mapped_bytes, self._mapped_rows = data, np.frombuffer(data, self._dtype, room, self.header_bytes)
        self.is_replaced = False

    def _has_few_new(self, count: int, data: NDArray[np.uint8] | bytes) -> bool:
        """Whether a view has a few new records of a table of which all others were checked and are whole."""
        is_checked = self._checked_count == self._count > 0 and not self._damaged_count and not self.waiting_records
        can_be_taken = data is self._mapped_bytes or not self._is_merged
        return is_checked and can_be_taken and 0 < count - self._count <= _FEW_ROWS

    def admit_until(self, unix_ns: int) -> bool:
        """Use the waiting records up to a moment at which the recording is known to go on; return whether there were any."""
        if not self.waiting_records:
            return False
        self._admitted_ns = max(self._admitted_ns, unix_ns - self.offset_ns)
        waiting = self._count_late(self._count + self.waiting_records)
        admitted, self.waiting_records = self.waiting_records - waiting, waiting
        self._count, self._last_ns = self._count + admitted, None
        return admitted > 0

    def _count_late(self, count: int) -> int:
        """Return how many of the last of ``count`` records are later than all before them by a long pause."""
        self.resumed_ns = None
        begin = max(self._count, count - _LATE_ROWS)
        times = self._mapped_rows[max(0, begin - 1) : count][self._time_column]
        if begin and max(few := times.tolist()) - min(few) <= LONG_PAUSE_NS:  # nearly always
            return 0
        times = times.astype(np.float64)  # the difference of two integers may be too large for one
        if begin == 0:
            times = np.concatenate(([float(self.created_ns - self.offset_ns)], times))
        for place in (np.diff(times) > LONG_PAUSE_NS).nonzero()[0].tolist():
            latest_ns = max(times[place], self._admitted_ns) + LONG_PAUSE_NS
            later = times[place + 1 :]
            if not ((later >= times[place] - TOLERANCE_NS) & (later <= latest_ns)).any():
                going_on = np.unique(later[(later >= later[0]) & (later <= later[0] + LONG_PAUSE_NS)])
                if len(going_on) >= _MANY_TIMES and going_on[-1] - going_on[0] >= _LONG_ENOUGH_NS:
                    self.resumed_ns = int(later[0]) + self.offset_ns
                return len(later)
        return 0

    def _read_row(self, place: int) -> bytes:
        return bytes(self._view_rows(self._mapped_bytes, place, place + 1)) if place >= 0 else b""

    def _view_rows(self, data: NDArray[np.uint8] | bytes, begin: int, end: int) -> memoryview:
        size, held = self._dtype.itemsize, cast("Any", data)
        return memoryview(held)[self.header_bytes + begin * size : self.header_bytes + end * size]

    @property
    def array(self) -> NDArray[Any]:
        """The whole records, oldest first."""
        if self._checked_count < self._count:
            self._check_records()
        return self._array

    @property
    def _times(self) -> NDArray[np.int64]:
        array = self.array
        if self._checked_times is None:
            self._checked_times = array[self._time_column]
        return self._checked_times

    def _check_records(self) -> None:
        self._add_checked(self._check.find_damaged(self._fresh))

    @property
    def _fresh(self) -> NDArray[Any]:
        return self._mapped_rows[self._checked_count : self._count]

    def _add_whole(self, count: int, data: NDArray[np.uint8] | bytes, last: bytes, last_ns: int) -> None:
        """Take over a view whose new records were checked; the last one and its time."""
        if data is not self._mapped_bytes:
            self._replace_bytes(data)
        self._count = self._checked_count = count
        self._array, self._checked_times = self._mapped_rows[:count], None
        self._last_checked, self._last_ns = last, last_ns

    def _add_checked(self, damaged: NDArray[np.bool_] | None) -> None:
        fresh, self._checked_count = self._fresh, self._count
        if damaged is None and not self._damaged_count:
            self._array = self._mapped_rows[: self._count]
        else:
            whole = fresh if damaged is None else fresh[~damaged]
            self._damaged_count += len(fresh) - len(whole)
            self._array = np.concatenate([self._array, whole])
        self._checked_times = self._last_ns = None
        self._last_checked = self._read_row(self._checked_count - 1)

    def release_memory(self) -> None:
        """Release the memory of records that were read; they can be read from disk again."""
        if isinstance(self._mapped_bytes, np.ndarray):
            release_pages(self._mapped_bytes)

    def read_output(self, begin: int, end: int) -> bytes:
        """Return these bytes of the output file of the same writer; none if it cannot be read."""
        try:
            return self._folder.read_bytes(self.path.stem + ".log", begin, end)
        except OSError:
            return b""

    def count_until(self, cursor_ns: int) -> int:
        """Return the number of records written up to the cursor (unix time): the length of a prefix of :attr:`array`."""
        own_ns = cursor_ns - self.offset_ns
        if self._last_ns is not None and own_ns >= self._last_ns and self._checked_count == self._count:
            return len(self._array)
        times = self._times
        end = len(times)
        if not end:
            return 0
        if self._last_ns is None:
            self._last_ns = int(times[-1])
        if own_ns >= self._last_ns:
            return end
        # Most cursors are near the end, and with many ranks each of them is looked up in thousands of tables.
        back = _NEAR_ROWS
        while back < end and times[end - back] > own_ns:
            back *= _SEARCH_FACTOR
        begin = max(0, end - back)
        if back == _NEAR_ROWS:
            return begin + bisect_right(times[begin:].tolist(), own_ns)
        return bisect_right(times, own_ns, begin, end - back // _SEARCH_FACTOR)

    def until(self, cursor_ns: int) -> NDArray[Any]:
        """Return the records up to a moment in unix time."""
        return self.array[: self.count_until(cursor_ns)]

    def between(self, begin_ns: int, end_ns: int, *, rows_before: int = 0, rows_after: int = 0) -> NDArray[Any]:
        """Return the records after ``begin_ns`` and up to ``end_ns`` (unix time), with this many before and after."""
        begin = max(0, self.count_until(begin_ns) - rows_before)
        return self.array[begin : self.count_until(end_ns) + rows_after]

    def unix_times(self, rows: NDArray[Any]) -> NDArray[np.int64]:
        """Return the unix times of records of this table."""
        times: NDArray[np.int64] = rows[self._time_column] + self.offset_ns
        return times

    def read_last_tick(self, cursor_ns: int, oldest_ns: int = 0) -> NDArray[Any]:
        """Return the records of the last tick up to the cursor, which share one time; none if older than ``oldest_ns``."""
        if (tick := self._read_tick_at_end(cursor_ns)) is not None:
            is_old = int(tick[self._time_column][0]) + self.offset_ns < oldest_ns - self.period_ns
            return tick[:0] if is_old else tick
        end = self.count_until(cursor_ns)
        if not end:
            return self.array[:0]
        time_ns = int(self._times[end - 1])
        if time_ns + self.offset_ns < oldest_ns - self.period_ns:
            return self.array[:0]
        recent = self._times[max(0, end - _NEAR_ROWS) : end].tolist()
        begin = end - len(recent) + bisect_left(recent, time_ns)
        if begin == end - len(recent):  # the tick may begin earlier
            back = _NEAR_ROWS
            while back < end and self._times[end - back] == time_ns:
                back *= _SEARCH_FACTOR
            begin = bisect_left(self._times, time_ns, max(0, end - back), end)
        return self.array[begin:end]

    @property
    def has_been_read(self) -> bool:
        """Whether all records were read and checked."""
        return self._checked_count == self._count

    def count_written(self, cursor_ns: int) -> int:
        """Return the number of records written up to the cursor; in a table not read yet, damaged ones may count."""
        end = self._find_end_near(cursor_ns)
        return self.count_until(cursor_ns) if end is None else end

    def _find_end_near(self, cursor_ns: int) -> int | None:
        """Return the number of records up to the cursor if the table is not read yet and the cursor is near its end."""
        if self._count - self._checked_count <= _MANY_ROWS:
            return None
        rows = self._mapped_rows[self._count - _TAIL_ROWS : self._count]
        if self._tail_count != self._count:
            self._tail_count, self._is_tail_whole = self._count, self._make_check().find_damaged(rows) is None
        if not self._is_tail_whole:
            return None
        end = int(np.searchsorted(rows[self._time_column], cursor_ns - self.offset_ns, "right"))
        return self._count - _TAIL_ROWS + end if end else None

    def _read_tick_at_end(self, cursor_ns: int) -> NDArray[Any] | None:
        """Return the last tick up to the cursor if the table is not read yet and the tick is near its end."""
        end = self._find_end_near(cursor_ns)
        if end is None:
            return None
        rows = self._mapped_rows[self._count - _TAIL_ROWS : end]
        begin = int(np.searchsorted(rows[self._time_column], rows[self._time_column][-1]))
        return rows[begin:] if begin else None

    def _make_check(self) -> RecordCheck:
        return RecordCheck(TABLES[self.table], self.created_ns - self.offset_ns, has_older=self._is_merged)

    @property
    def last_ns(self) -> int | None:
        """Unix time of the last record."""
        if self._last_ns is not None and self._checked_count == self._count:
            return self._last_ns + self.offset_ns
        if self._last_ns is None and self._count - self._checked_count > _MANY_ROWS:
            # Without reading all of them.
            time_ns = int(self._mapped_rows[self._count - 1][self._time_column])
            if self._check.is_possible(time_ns):
                return time_ns + self.offset_ns
        times = self._times
        if self._last_ns is None and len(times):
            self._last_ns = int(times[-1])
        return None if self._last_ns is None else self._last_ns + self.offset_ns


_View = tuple[Source, int, NDArray[np.uint8] | bytes]  # a table, how many records it has now, and its bytes


def refresh_together(sources: Iterable[Source]) -> list[Source]:
    """Read the records added to tables since the last call; return the tables with new ones.

    The few new records of many tables of one kind are checked as one array: one table after the other takes several times
    as long.
    """
    grown: list[Source] = []
    by_dtype: dict[tuple[str, np.dtype[Any]], list[_View]] = {}
    for source in sources:
        viewed = source._view_file()
        if viewed is not None and source._has_few_new(*viewed):
            by_dtype.setdefault((source.table, source._dtype), []).append((source, *viewed))
        elif viewed is not None and source._take_view(*viewed):
            grown.append(source)
    for (_, dtype), views in by_dtype.items():
        are_whole = _take_whole(views, dtype) if len(views) >= _MANY_TABLES else [False] * len(views)
        for (source, count, data), is_whole in zip(views, are_whole, strict=True):
            if is_whole or source._take_view(count, data):
                grown.append(source)
    return grown


def _take_whole(views: Sequence[_View], dtype: np.dtype[Any]) -> list[bool]:
    """Take over the new records of tables of one kind where they are certainly whole; return where they are."""
    sources = [source for source, _, _ in views]
    before = b"".join([source._last_checked for source in sources])
    if before != b"".join([source._view_rows(data, source._count - 1, source._count) for source, _, data in views]):
        return [False] * len(views)
    rows = np.frombuffer(b"".join([source._view_rows(data, source._count, count) for source, count, data in views]), dtype)
    counts = [count - source._count for source, count, _ in views]
    checks = [source._check for source in sources]
    are_whole = pass_whole(checks, np.frombuffer(before, dtype), rows, counts, LONG_PAUSE_NS)
    lasts = rows[np.cumsum(counts) - 1]
    last_times, last_bytes = lasts[sources[0]._time_column].tolist(), lasts.tobytes()
    ends = range(dtype.itemsize, len(last_bytes) + 1, dtype.itemsize)
    for (source, count, data), is_whole, end, last_ns in zip(views, are_whole, ends, last_times, strict=True):
        if is_whole:
            source._add_whole(count, data, last_bytes[end - dtype.itemsize : end], last_ns)
    return are_whole


def _build_dtype(header: dict[str, Any], name: str) -> np.dtype[Any]:
    """Return the dtype of a table's records. An older recording lacks columns that were added since.

    Raise ValueError or TypeError if another column is missing, or if one is of another type than the table's.
    """
    dtype = parse_columns(header["dtype"])
    for field in TABLES[str(header["table"])].fields:
        if field.name not in (dtype.names or ()):
            if field.name != "pad" and not field.since:
                raise ValueError(f"{name} lacks the column {field.name}")
        elif dtype[field.name] != np.dtype(field.dtype):
            raise ValueError(f"{name} has {field.name} of another type")
    return dtype
