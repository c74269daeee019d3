"""Which phase a rank was in at given moments, from its begins and spans."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.session.reader import Source

Ints = NDArray[np.int64]

NOT_YET = -1  # before the rank's first phase: its probe was not awake
OTHER = 0

# Begins looked back through for the phases that are still open; phases nest three deep, an evaluation has many within it.
_TAIL = 4096


def innermost(begins: Source, spans: Source | None, moments: Ints, cursor_ns: int) -> NDArray[np.int16]:
    """The innermost phase (index into PHASES) at each of the moments, as known at the cursor; see NOT_YET and OTHER.

    ``moments`` are unix nanoseconds, ascending, shape (n,).
    """
    found = np.full(len(moments), NOT_YET, np.int16)
    known = begins.array[: begins.count_known(cursor_ns)]
    if not len(known) or not len(moments):
        return found
    own = moments - begins.offset_ns
    found[own >= known["time_ns"][0]] = OTHER
    closed = _closed(spans, int(moments[0]), cursor_ns)
    for depth in range(4):
        mine = closed[closed["depth"] == depth] if closed is not None else None
        if mine is not None and len(mine):
            place = np.searchsorted(mine["begin_ns"], own, "right") - 1
            inside = (place >= 0) & (own < mine["end_ns"][place])
            found[inside] = mine["phase"][place[inside]]
    for begin in _open(known[-_TAIL:], spans, cursor_ns):
        # What is open began after everything of its depth or deeper that is closed, or holds it.
        later = own >= begin["time_ns"]
        found[later & ~_deeper(closed, own, int(begin["depth"]))] = begin["phase"]
    return found


def _closed(spans: Source | None, from_ns: int, cursor_ns: int) -> NDArray[Any] | None:
    """The spans that ended between a moment and the cursor."""
    return None if spans is None else spans.array[spans.count_known(from_ns) : spans.count_known(cursor_ns)]


def _deeper(closed: NDArray[Any] | None, own: Ints, depth: int) -> NDArray[np.bool_]:
    """Which moments lie in closed phases below a depth."""
    inside = np.zeros(len(own), np.bool_)
    if closed is not None:
        for below in range(depth + 1, 4):
            mine = closed[closed["depth"] == below]
            if len(mine):
                place = np.searchsorted(mine["begin_ns"], own, "right") - 1
                inside |= (place >= 0) & (own < mine["end_ns"][place])
    return inside


def _open(begins: NDArray[Any], spans: Source | None, cursor_ns: int) -> list[Any]:
    """The phases in progress at the cursor, the outermost first."""
    found: list[Any] = []
    ended = spans.array[: spans.count_known(cursor_ns)][-_TAIL:] if spans is not None else None
    for depth in range(4):
        here = np.flatnonzero(begins["depth"] == depth)
        if not len(here):
            break
        last = begins[here[-1]]
        if ended is not None:
            over = ended["begin_ns"][ended["depth"] == depth]
            if len(over) and over[-1] == last["time_ns"]:
                break
        found.append(last)
        begins = begins[here[-1] + 1 :]
    return found
