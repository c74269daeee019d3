"""The last output of a job, read without the output before it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zerotop.recording.moments.at import At
from zerotop.recording.output.missing_output import group_segments
from zerotop.recording.output.transcript import read_lines
from zerotop.recording.reader import Source

# Enough for the messages of schedulers and launchers and a few tracebacks.
_READ_BYTES = 1 << 18
# Of the output since the last look, as many records are read, and as many bytes of a line without an end are kept.
_NEW_RECORDS, _LONGEST_BYTES = 1 << 16, 1 << 16
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


class PrintedLine(NamedTuple):
    """A finished line of output, without colours."""

    time_ns: int  # unix time at which it was finished
    text: str


def read_last_lines(at: At) -> list[list[PrintedLine]]:
    """Return the finished lines in about the last ``_READ_BYTES`` of each stream up to the cursor, one list a stream."""
    streams = []
    for source in at.sources["output"]:
        count = source.count_until(at.cursor_ns)
        if not count:
            continue
        ends = source.array["offset"][:count] + source.array["length"][:count]
        begin = int(np.searchsorted(ends, ends[-1] - _READ_BYTES, "right"))
        for code in np.unique(source.array["stream"][begin:count]).tolist():
            lines, times_ns = read_lines(source, code, begin, count)
            cleaned = [_clean_line(line, time_ns) for line, time_ns in zip(lines, times_ns, strict=False)]
            # Of a file that a rank writes: its lines need no prefix there, and get the one that PyTorch would print.
            mark = f"[rank{source.rank}]:" if source.role == "rank" else ""
            streams.append(
                [one if one.text.startswith(mark) else one._replace(text=f"{mark} {one.text}") for one in cleaned]
            )
    return streams


class LineFollower:
    """Reads the finished lines of each stream of output once, while the cursor moves on."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, int], tuple[int, bytes]] = {}  # records read, and a line without an end
        self._marked: dict[tuple[str, int], list[PrintedLine]] = {}

    def read_new(self, at: At) -> Iterator[list[PrintedLine]]:
        """Yield the new lines of each stream that has some."""
        for _, lines, times_ns in self._read_streams(at):
            yield list(map(_clean_line, lines, times_ns))

    def read_after(self, at: At, mark: str, most: int) -> Iterator[list[PrintedLine]]:
        """Yield the new lines of each stream, from its last ``mark`` on if that is at most so many lines before.

        Streams without a mark in these are left out.
        """
        for key, finished, times_ns in self._read_streams(at):
            lines = self._marked.pop(key, [])
            if lines or any(mark.encode() in line for line in finished):
                lines += map(_clean_line, finished, times_ns)
                places = [index for index, line in enumerate(lines) if mark in line.text]
                yield lines[places[0] :]
                if len(lines) - places[-1] <= most:
                    self._marked[key] = lines[places[-1] :]

    def _read_streams(self, at: At) -> Iterator[tuple[tuple[str, int], list[bytes], list[int]]]:
        for source in at.sources["output"]:
            count = source.count_until(at.cursor_ns)
            for code in np.unique(source.array["stream"][:count][-_NEW_RECORDS:]).tolist():
                key = str(source.path), code
                begin, rest = self._streams.get(key, (0, b""))
                begin = max(begin, count - _NEW_RECORDS)
                parts, times_ns = read_lines(source, code, begin, count) if begin < count else ([b""], [])
                *finished, unfinished = [rest + parts[0], *parts[1:]]
                self._streams[key] = count, unfinished[-_LONGEST_BYTES:]
                if finished:
                    yield key, finished, times_ns


def _clean_line(line: bytes, time_ns: int) -> PrintedLine:
    # PyTorch's handler of bus errors in workers ends its message with a NUL.
    text = line.decode("utf-8", "replace").replace("\0", "").rstrip("\r").rpartition("\r")[2]
    return PrintedLine(time_ns, _ESCAPE.sub("", text))


def read_output_tail(at: At, size: int = 32768) -> bytes:
    """Return the last ``size`` bytes of output up to the cursor of each node, one node after another."""
    sources = at.sources["output"]
    tails: list[bytes] = []
    for indices in group_segments(sources):
        tail = b""
        for index in reversed(indices):
            tail = _read_tail(sources[index], at.cursor_ns, size - len(tail)) + tail
            if len(tail) >= size:
                break
        tails.append(tail)
    return b"".join(tails)


def _read_tail(source: Source, cursor_ns: int, size: int) -> bytes:
    count = source.count_until(cursor_ns)
    if not count:
        return b""
    last = source.array[count - 1]
    end = int(last["offset"]) + int(last["length"])
    return source.read_output(max(0, end - size), end)
