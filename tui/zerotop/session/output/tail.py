"""The last output of a job, without reading what came before."""

from __future__ import annotations

from zerotop.session.output.missing_output import group_segments
from zerotop.session.reader import Session, Source


def read_output_tail(session: Session, cursor_ns: int, size: int = 32768) -> bytes:
    """Return the last ``size`` bytes of output up to the cursor of each node, one node after another."""
    sources = session.sources["output"]
    tails: list[bytes] = []
    for indices in group_segments(sources):
        tail = b""
        for index in reversed(indices):
            tail = _read_tail(sources[index], cursor_ns, size - len(tail)) + tail
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
