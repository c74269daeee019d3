"""What the job printed, as lines, at any cursor."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.session.ansi import TerminalScreen, trim_rows
from zerotop.session.reader import Session, Source

# How far back in the output lines are first looked for; a progress bar writes hundreds of bytes for one line.
_FIRST_BYTES = 1 << 18
_MAX_BYTES = 1 << 25
_FAR_FUTURE_NS = 1 << 63


class Transcript:
    """Reads output forward while the cursor goes on, and from further back after it went back.

    Where a job's streams were recorded apart, each is a terminal of its own, so that a progress bar on one does not run into
    lines of the other; lines are in the order in which they were finished, those in progress last.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._streams: dict[tuple[int, int], _OutputStream] = {}
        self._stream_codes: dict[int, tuple[int, tuple[int, ...]]] = {}  # the streams among so many records of a source
        self._lines_key: tuple[tuple[int, ...], int] | None = None
        self._lines: tuple[str, ...] = ()

    def read_tail(self, cursor_ns: int, max_lines: int) -> tuple[str, ...]:
        """The last lines at the cursor, at most so many."""
        sources = self._session.sources["output"]
        known = tuple(source.count_until(cursor_ns) for source in sources), max_lines
        if known != self._lines_key:
            self._lines_key = known
            self._lines = self._merge_streams(list(zip(sources, known[0], strict=True)), max_lines)
        return self._lines

    def _merge_streams(self, sources: list[tuple[Source, int]], max_lines: int) -> tuple[str, ...]:
        streams = [self._advance_stream(place, code, count, max_lines) for place, code, count in self._iter_streams(sources)]
        if len(streams) == 1:
            return trim_rows(streams[0].rows, max_lines)
        rows = heapq.merge(*(stream.iter_finished() for stream in streams), key=lambda row: row[0])
        return trim_rows([text for _, text in rows], max_lines)

    def _iter_streams(self, sources: list[tuple[Source, int]]) -> Iterator[tuple[int, int, int]]:
        """(place of the source, stream, records known) of everything printed on."""
        for place, (source, count) in enumerate(sources):
            seen, codes = self._stream_codes.get(place, (0, ()))
            if count < seen:
                seen, codes = 0, ()
            if count > seen:
                codes = tuple(sorted({*codes, *np.unique(source.array["stream"][seen:count]).tolist()}))
            self._stream_codes[place] = count, codes
            for code in codes:
                yield place, code, count

    def _advance_stream(self, source_index: int, code: int, count: int, max_lines: int) -> _OutputStream:
        stream = self._streams.get((source_index, code))
        if stream is None or stream.record_count > count or stream.max_lines < max_lines:
            stream = _OutputStream(self._session.sources["output"][source_index], code, max_lines)
            self._streams[(source_index, code)] = stream
        stream.advance_to(count)
        return stream


class _OutputStream:
    """One stream of one node's output, up to a record."""

    def __init__(self, source: Source, code: int, max_lines: int) -> None:
        self.record_count = 0  # records of the source that were read or passed over
        self.max_lines = max_lines
        self._source = source
        self._code = code
        self._screen = TerminalScreen(max_lines)

    @property
    def rows(self) -> list[str]:
        """Its lines, the one in progress last."""
        return self._screen.rows

    def iter_finished(self) -> Iterator[tuple[int, str]]:
        """(when it was finished, line) of its last lines; one in progress is finished in a future far away."""
        rows, times = self.rows, [*self._screen.finished_ns, _FAR_FUTURE_NS]
        if not rows[-1].strip():
            rows, times = rows[:-1], times[:-1]
        begin = max(0, len(rows) - self.max_lines - 1)
        return zip(times[begin:], rows[begin:], strict=True)

    def advance_to(self, count: int) -> None:
        """Reads on, up to ``count`` records of the source."""
        if not self.record_count:
            self._read_end(count)
        elif count > self.record_count:
            self._screen.feed_lines(*self._read_range(self.record_count, count))
        self.record_count = count

    def _read_end(self, count: int) -> None:
        """Reads the end of what is known, as much as ``most`` lines need."""
        ends = self._source.array["offset"][:count] + self._source.array["length"][:count]
        look = _FIRST_BYTES
        while True:
            first = int(np.searchsorted(ends, ends[-1] - look))
            lines, times = self._read_range(first, count)
            if first == 0 or len(times) > self.max_lines or look >= _MAX_BYTES:
                break
            look *= 8
        # Whatever the output is cut in begins in the middle of a line.
        begin = 1 if first and times else 0
        self._screen.feed_lines(lines[begin:], times[begin:])

    def _read_range(self, begin: int, end: int) -> tuple[list[bytes], list[int]]:
        return read_lines(self._source, self._code, begin, end)


def read_lines(source: Source, code: int, begin: int, end: int) -> tuple[list[bytes], list[int]]:
    """The bytes of one stream in these records, split at newlines, and when each newline came (unix ns)."""
    data = read_stream(source, code, begin, end)
    if b"\n" not in data:
        return [data], []
    mine = source.array[begin:end][source.array["stream"][begin:end] == code]
    newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    # On a full disk bytes may have been recorded that no record tells of: they came with what follows, or at the end.
    pieces = np.minimum(np.searchsorted(np.cumsum(mine["length"]), newlines, "right"), len(mine) - 1)
    return data.split(b"\n"), (mine["time_ns"][pieces] + source.offset_ns).tolist()


def read_stream(source: Source, code: int, begin: int, end: int) -> bytes:
    """What these records have of one stream, which lies in the log one after the other; none where it cannot be read."""
    records = source.array[begin:end]
    mine = records[records["stream"] == code]
    return _read_pieces(source, records, mine)


def _read_pieces(source: Source, records: NDArray[Any], chosen: NDArray[Any]) -> bytes:
    """The bytes of some of these records, which lie in the log one after the other; none where it cannot be read."""
    if not len(chosen):
        return b""
    base, end = int(records["offset"][0]), int(records["offset"][-1] + records["length"][-1])
    data = source.read_output(base, end)
    if len(chosen) == len(records):
        return data
    places = zip((chosen["offset"] - base).tolist(), chosen["length"].tolist(), strict=True)
    return b"".join(data[place : place + length] for place, length in places)
