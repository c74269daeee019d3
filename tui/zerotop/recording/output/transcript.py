"""The last lines of the job's output at any cursor."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.output.ansi import TerminalScreen, trim_rows
from zerotop.recording.output.missing_output import count_missing_bytes, format_gap
from zerotop.recording.reader import Recording, Source

# Bytes before the end that are read first; a progress bar writes hundreds of bytes for one line.
_FIRST_BYTES = 1 << 18
_MAX_BYTES = 1 << 25
_FAR_FUTURE_NS = 1 << 63


class Transcript:
    """A reader of output that continues while the cursor moves forward, and starts again when it moves back.

    Each recorded stream has its own terminal, so that a progress bar on one does not mix with lines of another. Lines are
    sorted by the time at which they were finished, unfinished ones last.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._streams: dict[tuple[int, int], _OutputStream] = {}
        self._stream_codes: dict[int, tuple[int, tuple[int, ...]]] = {}  # source -> (records read, their streams)
        self._lines_key: tuple[tuple[int, ...], int] | None = None
        self._lines: tuple[str, ...] = ()

    def read_tail(self, cursor_ns: int, max_lines: int) -> tuple[str, ...]:
        """Return the last ``max_lines`` lines at the cursor."""
        sources = self._recording.sources["output"]
        counts = tuple(source.count_until(cursor_ns) for source in sources)
        if (counts, max_lines) != self._lines_key:
            self._lines_key = counts, max_lines
            self._lines = self._merge_streams(list(zip(sources, counts, strict=True)), max_lines)
        return self._lines

    def _merge_streams(self, sources: list[tuple[Source, int]], max_lines: int) -> tuple[str, ...]:
        streams = [self._advance_stream(index, code, count, max_lines) for index, code, count in self._iter_streams(sources)]
        if len(streams) == 1:
            return trim_rows(streams[0].rows, max_lines)
        rows = heapq.merge(*(stream.iter_finished() for stream in streams), key=lambda row: row[0])
        return trim_rows([text for _, text in rows], max_lines)

    def _iter_streams(self, sources: list[tuple[Source, int]]) -> Iterator[tuple[int, int, int]]:
        """Iterate over (index of the source, stream, number of records) of all streams with output."""
        for index, (source, count) in enumerate(sources):
            begin, codes = self._stream_codes.get(index, (0, ()))
            if count < begin:
                begin, codes = 0, ()
            if count > begin:
                codes = tuple(sorted({*codes, *np.unique(source.array["stream"][begin:count]).tolist()}))
            self._stream_codes[index] = count, codes
            for code in codes:
                yield index, code, count

    def _advance_stream(self, source_index: int, code: int, count: int, max_lines: int) -> _OutputStream:
        stream = self._streams.get((source_index, code))
        if stream is None or stream.record_count > count or stream.max_lines < max_lines:
            sources = self._recording.sources["output"]
            missing_bytes = count_missing_bytes(sources)[source_index]
            stream = _OutputStream(sources[source_index], code, max_lines, missing_bytes)
            self._streams[(source_index, code)] = stream
        stream.advance_to(count)
        return stream


class _OutputStream:
    """One stream of a node's output up to a record."""

    def __init__(self, source: Source, code: int, max_lines: int, missing_bytes: int) -> None:
        """``missing_bytes``: of output before this source."""
        self._missing_bytes = missing_bytes
        self.record_count = 0  # records of the source that were read or skipped
        self.max_lines = max_lines
        self._source = source
        self._code = code
        self._screen = TerminalScreen(max_lines)

    @property
    def rows(self) -> list[str]:
        """Its lines, the unfinished one last."""
        return self._screen.rows

    def iter_finished(self) -> Iterator[tuple[int, str]]:
        """Iterate over (time finished, line) of its last lines; the unfinished one has a time in the far future."""
        rows, times = self.rows, [*self._screen.finished_ns, _FAR_FUTURE_NS]
        if not rows[-1].strip():
            rows, times = rows[:-1], times[:-1]
        begin = max(0, len(rows) - self.max_lines - 1)
        return zip(times[begin:], rows[begin:], strict=True)

    def advance_to(self, count: int) -> None:
        """Read up to ``count`` records of the source."""
        if not self.record_count:
            self._read_end(count)
        elif count > self.record_count:
            self._screen.feed_lines(*self._read_range(self.record_count, count))
        self.record_count = count

    def _read_end(self, count: int) -> None:
        """Read the end of the first ``count`` records, as much as ``max_lines`` lines need."""
        ends = self._source.array["offset"][:count] + self._source.array["length"][:count]
        size = _FIRST_BYTES
        while True:
            first = int(np.searchsorted(ends, ends[-1] - size))
            lines, times = self._read_range(first, count)
            if first == 0 or len(times) > self.max_lines or size >= _MAX_BYTES:
                break
            size *= 8
        if not first and self._missing_bytes and self._source.array["stream"][0] == self._code:
            time_ns = int(self._source.array["time_ns"][0]) + self._source.offset_ns
            self._screen.feed_lines([format_gap(self._missing_bytes).encode(), b""], [time_ns])
        # Output after a cut begins in the middle of a line.
        begin = 1 if first and times else 0
        self._screen.feed_lines(lines[begin:], times[begin:])

    def _read_range(self, begin: int, end: int) -> tuple[list[bytes], list[int]]:
        return read_lines(self._source, self._code, begin, end)


def read_lines(source: Source, code: int, begin: int, end: int) -> tuple[list[bytes], list[int]]:
    """Return the bytes of one stream in these records, split at newlines, and the unix time of each newline in ns."""
    data = read_stream(source, code, begin, end)
    newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    return data.split(b"\n"), _find_times(source, code, begin, end, newlines)


def read_updates(source: Source, code: int, begin: int, end: int) -> tuple[list[bytes], list[int]]:
    """Return the same, split where a progress bar starts its line anew as well, and the time at which each was written."""
    data = read_stream(source, code, begin, end).replace(b"\r", b"\n")
    newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    return data.split(b"\n"), _find_times(source, code, begin, end, np.maximum(newlines - 1, 0))


def _find_times(source: Source, code: int, begin: int, end: int, places: NDArray[np.intp]) -> list[int]:
    """Return when the bytes at these places of a stream's records were written, in unix ns."""
    if not len(places):
        return []
    records = source.array[begin:end][source.array["stream"][begin:end] == code]
    # On a full disk the log may have bytes without a record: they count to the next record, or to the last one.
    indices = np.minimum(np.searchsorted(np.cumsum(records["length"]), places, "right"), len(records) - 1)
    times: list[int] = (records["time_ns"][indices] + source.offset_ns).tolist()
    return times


def read_stream(source: Source, code: int, begin: int, end: int) -> bytes:
    """Return the bytes of one stream in these records; none if the log cannot be read."""
    records = source.array[begin:end]
    return _read_records(source, records, records[records["stream"] == code])


def _read_records(source: Source, records: NDArray[Any], chosen: NDArray[Any]) -> bytes:
    """Return the bytes of the chosen ones of consecutive records."""
    if not len(chosen):
        return b""
    base, end = int(records["offset"][0]), int(records["offset"][-1] + records["length"][-1])
    data = source.read_output(base, end)
    if len(chosen) == len(records):
        return data
    ranges = zip((chosen["offset"] - base).tolist(), chosen["length"].tolist(), strict=True)
    return b"".join(data[begin : begin + length] for begin, length in ranges)
