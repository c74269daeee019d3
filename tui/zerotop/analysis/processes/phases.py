"""A rank's phases at given moments, from its begins and spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.reader import Source
from zerotop.recording.samples import Ints
from zerotop_probe.recording.tables import BOUNDARY, COUNTED, PHASES

NOT_YET = -1  # before the rank's first phase
OTHER = 0
UNSEEN = -2  # in a counted step
UNSEEN_NAME = "unknown"

# Begins to search for the phases in progress: usually of one step, in an evaluation of all of it.
_TAIL_ROWS = (8, 64, 4096)
_RECENT_SPANS = 64  # spans to search for the ends of those phases: there may be 27 of counted steps after them


class OpenPhase(NamedTuple):
    """A phase in progress."""

    time_ns: int  # of its begin, on the writer's clock
    depth: int
    phase: int
    step: int


def find_current(begins: Source, spans: Source | None, cursor_ns: int) -> tuple[str, float, int | None]:
    """Return name, seconds so far and step of the innermost phase in progress; an empty name before the first phase."""
    last = begins.until(cursor_ns)[-1:]
    if not len(last):
        return "", 0.0, None
    step, now = int(last["step"][0]), cursor_ns - begins.offset_ns
    open_phases = find_open_phases(begins, spans, cursor_ns)
    if open_phases:
        return find_phase_name(open_phases[-1].phase), (now - open_phases[-1].time_ns) / 1e9, step
    latest_ns = int(last["time_ns"][0])
    if spans is not None and len(ended := spans.until(cursor_ns)):
        latest_ns = max(latest_ns, int(ended["end_ns"][-1]))
        if ended["flags"][-1] & COUNTED and ended["end_ns"][-1] == latest_ns:
            return UNSEEN_NAME, (now - latest_ns) / 1e9, int(ended["step"][-1]) + 1
    return find_phase_name(OTHER), (now - latest_ns) / 1e9, step


def find_step(begins: Source, spans: Source | None, cursor_ns: int) -> int | None:
    """Return the step that :func:`find_current` returns, nearly always without looking for the phase."""
    count = begins.count_until(cursor_ns)
    if not count:
        return None
    last = begins.array[count - 1]
    ended = spans.count_until(cursor_ns) if spans is not None else 0
    if (
        spans is not None
        and ended
        and (span := spans.array[ended - 1])["flags"] & COUNTED
        and span["end_ns"] >= last["time_ns"]
    ):
        return find_current(begins, spans, cursor_ns)[2]
    return int(last["step"])


def find_phase_name(phase: int) -> str:
    """Return the name of a phase code; codes of newer versions are OTHER, that of NOT_YET is empty."""
    if phase < 0:
        return UNSEEN_NAME if phase == UNSEEN else ""
    return PHASES[phase] if phase < len(PHASES) else PHASES[OTHER]


def find_open_phases(begins: Source, spans: Source | None, cursor_ns: int) -> list[OpenPhase]:
    """Return the phases in progress at the cursor, outermost first."""
    known = begins.count_until(cursor_ns)
    chain: list[OpenPhase] = []
    for tail in _TAIL_ROWS:
        chain = _find_latest_begins(begins.array[max(0, known - tail) : known])
        if known <= tail or (chain and not chain[-1].depth):
            break
    if spans is None:
        return chain[::-1]
    # A span that ended after the last begin of its depth is one of the last few.
    ended = spans.until(cursor_ns)[-_RECENT_SPANS:]
    closed = set(zip(ended["begin_ns"].tolist(), ended["depth"].tolist(), strict=True))
    return [phase for phase in reversed(chain) if (phase.time_ns, phase.depth) not in closed]


def _find_latest_begins(begins: NDArray[Any]) -> list[OpenPhase]:
    """Return the last begin, the last one of lower depth before it, and so on down to depth 0."""
    columns = (begins[column].tolist() for column in OpenPhase._fields)
    chain: list[OpenPhase] = []
    for phase in map(OpenPhase._make, reversed(list(zip(*columns, strict=True)))):
        if not chain or phase.depth < chain[-1].depth:
            chain.append(phase)
            if not phase.depth:
                break
    return chain


def find_innermost(begins: Source, spans: Source | None, moments: Ints, cursor_ns: int) -> NDArray[np.int16]:
    """Return the innermost phase (index into PHASES) at each moment, as known at the cursor; see NOT_YET, OTHER and UNSEEN.

    ``moments``: unix nanoseconds, ascending, shape (n,).
    """
    if not len(moments) or not begins.count_until(cursor_ns):
        return np.full(len(moments), NOT_YET, np.int16)
    return resolve_innermost(
        begins, read_closed_spans(spans, int(moments[0]), cursor_ns), find_open_phases(begins, spans, cursor_ns), moments
    )


def vote_phases(
    begins: Source | None, spans: Source | None, bins: range, bin_ns: int, votes: int, cursor_ns: int, exit_ns: int | None
) -> NDArray[np.intp]:
    """Return the phase in which a rank was for most of each bin, as known at the cursor; see NOT_YET, OTHER and UNSEEN.

    ``bins``: numbers of the bins; bin 0 begins at the epoch. ``votes``: moments in each bin at which the phase is read.
    ``exit_ns``: when the rank exited; after that its phase is NOT_YET.
    """
    if begins is None or not bins:
        return np.full(len(bins), NOT_YET, np.intp)
    interval = bin_ns // votes
    moments = np.arange(bins.start * bin_ns + interval // 2, bins.stop * bin_ns, interval)
    codes = find_innermost(begins, spans, moments, cursor_ns)
    if exit_ns is not None:
        codes[moments > exit_ns] = NOT_YET
    kinds = len(PHASES) - UNSEEN
    known = np.where((codes >= UNSEEN) & (codes < len(PHASES)), codes, OTHER) - UNSEEN
    cells = known.reshape(len(bins), -1) + np.arange(0, len(bins) * kinds, kinds)[:, None]
    counts = np.bincount(cells.ravel(), minlength=len(bins) * kinds).reshape(len(bins), kinds)
    return np.asarray(counts.argmax(axis=1) + UNSEEN)


def resolve_innermost(
    begins: Source, ended: NDArray[Any] | None, open_phases: Sequence[OpenPhase], moments: Ints
) -> NDArray[np.int16]:
    """Return the innermost phases from the spans that ended since the first moment, and the phases in progress."""
    own_ns = moments - begins.offset_ns
    codes = np.full(len(own_ns), NOT_YET, np.int16)
    codes[own_ns.searchsorted(begins.array["time_ns"][0]) :] = OTHER
    if ended is not None and (counted := ended["flags"] & COUNTED != 0).any():
        _paint_counted(codes, own_ns, ended, counted)
        ended = ended[~counted]
    count = len(ended) if ended is not None else 0
    layers = np.empty((4, count + len(open_phases)), np.int64)
    depth, low, high, phase = layers
    if ended is not None:
        depth[:count], phase[:count] = ended["depth"], ended["phase"]
        low[:count], high[:count] = own_ns.searchsorted(ended["begin_ns"]), own_ns.searchsorted(ended["end_ns"])
    for column, opened in enumerate(open_phases, count):
        layers[:, column] = opened.depth, own_ns.searchsorted(opened.time_ns), len(own_ns), opened.phase
    # Deeper phases overwrite outer ones.
    _, low, high, phase = layers[:, np.argsort(depth, kind="stable")]
    sizes = np.maximum(0, high - low)
    ends = sizes.cumsum()
    codes[np.arange(sizes.sum()) + np.repeat(low - ends + sizes, sizes)] = np.repeat(phase, sizes)
    return codes


def _paint_counted(codes: NDArray[np.int16], own_ns: Ints, ended: NDArray[Any], counted: NDArray[np.bool_]) -> None:
    """Mark the moments in counted steps; after a counted step the phases of the next are not known before its end either."""
    closing = (ended["flags"] & BOUNDARY != 0) & (ended["engine"] == 0)
    ends = np.append(ended["end_ns"][closing], np.iinfo(np.int64).max)
    are_counted = np.append(counted[closing], counted[closing][-1:])
    step = ends.searchsorted(own_ns)
    codes[(codes == OTHER) & are_counted[np.minimum(step, len(are_counted) - 1)]] = UNSEEN


def read_closed_spans(spans: Source | None, from_ns: int, cursor_ns: int) -> NDArray[Any] | None:
    """Return the spans that ended between a moment and the cursor."""
    return spans.between(from_ns, cursor_ns) if spans is not None else None
