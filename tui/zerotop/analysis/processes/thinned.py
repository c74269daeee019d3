"""Times of a rank whose records were deleted after their steps had been folded: nothing but the steps' figures is known."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from zerotop.session.reader import Session, Source
from zerotop.session.samples import Ints, Rows

_NONE = np.empty((0, 2), np.int64)
# What was deleted before a table was opened does not change; later deletions leave what was mapped.
_TIMES: WeakKeyDictionary[Source, Ints] = WeakKeyDictionary()


def find_thinned_times(session: Session, source: Source) -> Ints:
    """Return the (begin, end) of the times without records of a rank's table, in unix nanoseconds, shape (n, 2)."""
    times = _TIMES.get(source)
    if times is None:
        folded, spans = (session.find_sibling(name, source) for name in ("folded", "spans"))
        times = _NONE
        if folded is not None and spans is not None and len(folded.array):
            times = _compute_times(folded.array, mask_thinned(folded, spans)) + folded.offset_ns
        _TIMES[source] = times
    return times


def mask_thinned(folded: Source, spans: Source) -> NDArray[np.bool_]:
    """Return for each record of FOLDED whether the spans of its steps are gone."""
    return ~np.isin(folded.array["end_ns"], spans.array["end_ns"])


def _compute_times(folded: Rows, thinned: NDArray[np.bool_]) -> Ints:
    edges = np.flatnonzero(np.diff(thinned, prepend=False, append=False))
    firsts, lasts = edges[::2], edges[1::2] - 1
    begins = np.where(firsts > 0, folded["end_ns"][firsts - 1], folded["begin_ns"][firsts])
    return np.stack([begins, folded["end_ns"][lasts]], axis=1)


def is_thinned_at(session: Session, source: Source, time_ns: int) -> bool:
    """Whether the records of a rank's table at a unix time were deleted."""
    times = find_thinned_times(session, source)
    index = int(np.searchsorted(times[:, 1], time_ns))
    return index < len(times) and bool(times[index, 0] < time_ns)


def mask_moments(session: Session, source: Source, moments: Ints) -> NDArray[np.bool_]:
    """Return whether the records of a rank's table at each moment (unix nanoseconds) were deleted."""
    times = find_thinned_times(session, source)
    if not len(times):
        return np.zeros(len(moments), np.bool_)
    index = np.minimum(np.searchsorted(times[:, 1], moments), len(times) - 1)
    return (times[index, 0] < moments) & (moments < times[index, 1])
