"""Times in which a rank's records were deleted after folding: only the figures of their steps are known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.moments.at import At
from zerotop.recording.moments.moment import keep
from zerotop.recording.reader import Recording, Source
from zerotop.recording.samples import Ints

_NONE = np.empty((0, 2), np.int64)


def find_thinned_times(recording: Recording, source: Source) -> Ints:
    """Return the (begin, end) of the times without records of a rank's table, in unix nanoseconds, shape (n, 2)."""
    folded = recording.find_sibling("folded", source) if recording.sources["folded"] else None
    spans = None if folded is None else recording.find_sibling("spans", source)
    if folded is None or spans is None or not len(folded.array):
        return _NONE
    return keep(folded, _compute_times, folded, spans)


def mask_thinned(folded: Source, spans: Source) -> NDArray[np.bool_]:
    """Return for each record of FOLDED whether the spans of its steps are gone."""
    ends, span_ends = folded.array["end_ns"], np.ascontiguousarray(spans.array["end_ns"])
    thinned = np.ones(len(ends), np.bool_)
    if len(span_ends):
        first = int(np.searchsorted(ends, span_ends[0]))  # most folded steps are older than all spans
        nearest = np.minimum(np.searchsorted(span_ends, ends[first:]), len(span_ends) - 1)
        thinned[first:] = span_ends[nearest] != ends[first:]
    return thinned


# Once for each table: deletions before it was opened do not change, and later ones do not affect mapped files.
def _compute_times(source: Source, spans: Source) -> Ints:
    folded, thinned = source.array, mask_thinned(source, spans)
    edges = np.flatnonzero(np.diff(thinned, prepend=False, append=False))
    firsts, lasts = edges[::2], edges[1::2] - 1
    begins = np.where(firsts > 0, folded["end_ns"][firsts - 1], folded["begin_ns"][firsts])
    return np.stack([begins, folded["end_ns"][lasts]], axis=1) + source.offset_ns


def is_thinned_at(at: At, source: Source) -> bool:
    """Whether the records of a rank's table at a unix time were deleted."""
    times = find_thinned_times(at.recording, source)
    index = int(np.searchsorted(times[:, 1], at.cursor_ns)) if len(times) else 0
    return index < len(times) and bool(times[index, 0] < at.cursor_ns)


def mask_moments(recording: Recording, source: Source, moments: Ints) -> NDArray[np.bool_]:
    """Return whether the records of a rank's table at each moment (unix nanoseconds) were deleted."""
    times = find_thinned_times(recording, source)
    if not len(times):
        return np.zeros(len(moments), np.bool_)
    index = np.minimum(np.searchsorted(times[:, 1], moments), len(times) - 1)
    thinned: NDArray[np.bool_] = (times[index, 0] < moments) & (moments < times[index, 1])
    return thinned


def find_folded_peak(at: At, source: Source, column: str) -> int:
    """Return the highest value of a column of FOLDED up to the cursor, of the rank that wrote a table; 0 without any."""
    folded = at.find_sibling("folded", source) if at.sources["folded"] else None
    return 0 if folded is None else int(folded.until(at.cursor_ns)[column].max(initial=0))
