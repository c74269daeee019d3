"""The job's whole output in blocks of bytes, which are converted to lines on demand.

This makes every place in hundreds of megabytes available at once: only one column of the index is read as a whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.output.ansi import TerminalScreen
from zerotop.recording.output.missing_output import count_missing_bytes, format_gap
from zerotop.recording.output.transcript import read_lines, read_stream
from zerotop.recording.reader import Recording, Source

BLOCK = 1 << 17
# A line that ends in a block may begin this far before it. Of a longer progress bar only the end matters.
_LOOKBACK_BYTES = 1 << 14
_MAX_CACHED = 48
_MAX_LINES = 1 << 20

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class OutputLines:
    """Lines by the time at which they were finished. All fields have the same length."""

    texts: tuple[str, ...]
    times_ns: Ints  # unix time at which each was finished; for an unfinished line, that of its last bytes
    streams: Ints  # index into STREAMS


NO_LINES = OutputLines((), np.empty(0, np.int64), np.empty(0, np.int64))


class OutputBlocks:
    """The output of all nodes in blocks. A block contains the lines that were finished in it."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._block_ends = np.zeros((1, 0), np.int64)  # (block, source) -> records up to its end; row 0 is the begin
        self._sealed_bytes = 0  # bytes since the last cut
        self._record_counts: list[int] = []
        self._cache: OrderedDict[tuple[int, tuple[int, ...]], tuple[OutputLines, OutputLines]] = OrderedDict()

    def refresh(self) -> None:
        """Add the records written since the last call."""
        sources = self._recording.sources["output"]
        missing = len(sources) - len(self._record_counts)
        self._record_counts += [0] * missing
        self._block_ends = np.pad(self._block_ends, ((0, 0), (0, missing)))
        counts = [len(source.array) for source in sources]
        if counts != self._record_counts:
            self._cut_blocks(sources, counts)
            self._record_counts = counts

    def _cut_blocks(self, sources: list[Source], record_counts: list[int]) -> None:
        fresh = [
            source.array[begin:end] for source, begin, end in zip(sources, self._record_counts, record_counts, strict=True)
        ]
        lengths = np.concatenate([rows["length"] for rows in fresh]).astype(np.int64)
        source_indices = np.repeat(np.arange(len(sources)), [len(rows) for rows in fresh])
        if sum(len(rows) > 0 for rows in fresh) > 1:
            times = [rows["time_ns"] + source.offset_ns for rows, source in zip(fresh, sources, strict=True)]
            order = np.argsort(np.concatenate(times), kind="stable")
            lengths, source_indices = lengths[order], source_indices[order]
        written = np.cumsum(lengths) + self._sealed_bytes
        cuts = np.flatnonzero(np.diff(written // BLOCK, prepend=0)) + 1
        ends = np.stack([np.cumsum(source_indices == index)[cuts - 1] for index in range(len(sources))], axis=1)
        self._block_ends = np.concatenate([self._block_ends, ends + np.array(self._record_counts)])
        self._sealed_bytes = int(written[-1] % BLOCK) if len(written) else self._sealed_bytes

    @property
    def sealed_count(self) -> int:
        """Number of blocks that no longer change; one more block grows."""
        return len(self._block_ends) - 1

    def count_records(self, cursor_ns: int) -> tuple[int, ...]:
        """Return the number of records of each node up to the cursor."""
        return tuple(
            source.count_until(cursor_ns) for source in self._recording.sources["output"][: len(self._record_counts)]
        )

    def find_block(self, counts: tuple[int, ...]) -> int:
        """Return the block in which the output up to these record counts ends."""
        return int(np.searchsorted(self._block_ends.sum(axis=1)[1:], sum(counts), "right"))

    def _find_range(self, block: int) -> tuple[list[int], list[int]]:
        end = self._block_ends[block + 1].tolist() if block < self.sealed_count else self._record_counts
        return self._block_ends[block].tolist(), end

    def finished_lines(self, block: int) -> OutputLines:
        """Return the lines that were finished in a block."""
        return self._get_lines(block, tuple(self._find_range(block)[1]))[0]

    def unfinished_lines(self, block: int, counts: tuple[int, ...]) -> OutputLines:
        """Return the lines of a block that are unfinished at these record counts."""
        begin, end = self._find_range(block)
        return self._get_lines(block, tuple(np.clip(counts, begin, end).tolist()))[1]

    def _get_lines(self, block: int, ends: tuple[int, ...]) -> tuple[OutputLines, OutputLines]:
        """Return (finished, unfinished) lines of a block up to these records."""
        lines = self._cache.get((block, ends))
        if lines is None:
            lines = self._build_lines(block, ends)
            self._cache[block, ends] = lines
            if len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end((block, ends))
        return lines

    def _build_lines(self, block: int, ends: tuple[int, ...]) -> tuple[OutputLines, OutputLines]:
        finished: list[tuple[int, int, str]] = []
        unfinished: list[tuple[int, int, str]] = []
        sources = self._recording.sources["output"]
        missing = count_missing_bytes(sources)
        for source, begin, end, gap in zip(sources, self._find_range(block)[0], ends, missing, strict=False):
            if gap and not begin and end:
                first = source.array[0]
                finished.append((int(first["time_ns"]) + source.offset_ns, int(first["stream"]), format_gap(gap)))
            for code in _find_streams(source, *_extend_range(source, begin, end)):
                whole, rest = _read_stream_lines(source, code, begin, end)
                finished.extend(whole)
                unfinished.extend(rest)
        finished.sort(key=lambda line: line[0])
        unfinished.sort(key=lambda line: line[0])
        return _make_lines(finished), _make_lines(unfinished)

    def iter_bytes(self, block: int) -> Iterator[bytes]:
        """Iterate over the bytes of a block, a stream at a time."""
        for source, begin, end in zip(self._recording.sources["output"], *self._find_range(block), strict=False):
            first, _ = _extend_range(source, begin, end)
            for code in _find_streams(source, first, end):
                yield read_stream(source, code, first, end)


def _make_lines(lines: list[tuple[int, int, str]]) -> OutputLines:
    if not lines:
        return NO_LINES
    times, streams, texts = zip(*lines, strict=True)
    return OutputLines(texts, np.array(times, np.int64), np.array(streams, np.int64))


def _extend_range(source: Source, begin: int, end: int) -> tuple[int, int]:
    """Extend a range of records by the lookback before ``begin``."""
    if not begin:
        return 0, end
    offsets = source.array["offset"]
    first = int(np.searchsorted(offsets, int(offsets[begin - 1]) + int(source.array["length"][begin - 1]) - _LOOKBACK_BYTES))
    return min(first, begin), end


def _find_streams(source: Source, begin: int, end: int) -> list[int]:
    codes: list[int] = np.unique(source.array["stream"][begin:end]).tolist()
    return codes


def _read_stream_lines(
    source: Source, code: int, begin: int, end: int
) -> tuple[list[tuple[int, int, str]], list[tuple[int, int, str]]]:
    """Return (time, stream, line) of the lines of one stream finished in these records, and of the unfinished one."""
    screen = TerminalScreen(_MAX_LINES)
    first, _ = _extend_range(source, begin, end)
    lines, times = read_lines(source, code, first, begin)
    # Output after a cut begins in the middle of a line.
    skipped = 1 if first and times else 0
    screen.feed_lines(lines[skipped:], times[skipped:])
    before = len(screen.finished_ns)
    screen.feed_lines(*read_lines(source, code, begin, end))
    whole = [(time_ns, code, row) for time_ns, row in zip(screen.finished_ns[before:], screen.rows[before:-1], strict=True)]
    last = screen.rows[-1]
    if not last.strip() or end <= first:
        return whole, []
    return whole, [(int(source.array["time_ns"][end - 1]) + source.offset_ns, code, last)]
