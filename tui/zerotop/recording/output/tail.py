"""The last output of a job, read without the output before it."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from zerotop.recording.moments.at import At
from zerotop.recording.output.missing_output import group_segments
from zerotop.recording.output.transcript import read_lines
from zerotop.recording.reader import Source

# Enough for the messages of schedulers and launchers and a few tracebacks.
_READ_BYTES = 1 << 18
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
