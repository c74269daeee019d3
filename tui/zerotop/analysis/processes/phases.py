"""Which phase a rank was in at given moments, and is in now, from its begins and spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.session.reader import Source
from zerotop_probe.recording.tables import PHASES

Ints = NDArray[np.int64]

NOT_YET = -1  # before the rank's first phase: its probe was not awake
OTHER = 0

# Begins looked back through for the phases in progress: usually a step's, in an evaluation all of that.
_TAIL_ROWS = (8, 64, 4096)
_RECENT_SPANS = 32  # spans looked back through for those that ended since


class OpenPhase(NamedTuple):
    """A phase in progress."""

    time_ns: int  # of the writer's clock
    depth: int
    phase: int
    step: int


def find_current(begins: Source, spans: Source | None, cursor_ns: int) -> tuple[str, float, int | None]:
    """Name, seconds so far and step of the innermost phase in progress; an empty name where the probe was not awake."""
    known = begins.count_until(cursor_ns)
    if not known:
        return "", 0.0, None
    step = int(begins.array["step"][known - 1])
    now = cursor_ns - begins.offset_ns
    found = find_open_phases(begins, spans, cursor_ns)
    if found:
        return phase_name(found[-1].phase), (now - found[-1].time_ns) / 1e9, step
    times = spans.until(cursor_ns)["end_ns"] if spans is not None else begins.array["time_ns"][:0]
    latest = times[-1] if len(times) else begins.array["time_ns"][known - 1]
    return phase_name(OTHER), (now - int(latest)) / 1e9, step


def phase_name(phase: int) -> str:
    """A phase by its code; one that only a newer version knows is some other."""
    return PHASES[phase] if phase < len(PHASES) else PHASES[OTHER]


def find_open_phases(begins: Source, spans: Source | None, cursor_ns: int) -> list[OpenPhase]:
    """The phases in progress at the cursor, the outermost first."""
    known = begins.count_until(cursor_ns)
    chain: list[OpenPhase] = []
    for tail in _TAIL_ROWS:
        chain = _find_latest_begins(begins.array[max(0, known - tail) : known])
        if known <= tail or (chain and not chain[-1].depth):
            break
    if spans is None:
        return chain[::-1]
    # What ended after the last begin of its depth is among the last few.
    ended = spans.until(cursor_ns)[-_RECENT_SPANS:]
    over = set(zip(ended["begin_ns"].tolist(), ended["depth"].tolist(), strict=True))
    return [begun for begun in reversed(chain) if (begun.time_ns, begun.depth) not in over]


def _find_latest_begins(begins: NDArray[Any]) -> list[OpenPhase]:
    """The last begin, the last one before it of lower depth, and so on to depth 0."""
    columns = (begins[column].tolist() for column in OpenPhase._fields)
    chain: list[OpenPhase] = []
    for begun in map(OpenPhase._make, reversed(list(zip(*columns, strict=True)))):
        if not chain or begun.depth < chain[-1].depth:
            chain.append(begun)
            if not begun.depth:
                break
    return chain


def find_innermost(begins: Source, spans: Source | None, moments: Ints, cursor_ns: int) -> NDArray[np.int16]:
    """The innermost phase (index into PHASES) at each of the moments, as known at the cursor; see NOT_YET and OTHER.

    ``moments`` are unix nanoseconds, ascending, shape (n,).
    """
    if not len(moments) or not begins.count_until(cursor_ns):
        return np.full(len(moments), NOT_YET, np.int16)
    return resolve_innermost(
        begins, read_closed_spans(spans, int(moments[0]), cursor_ns), find_open_phases(begins, spans, cursor_ns), moments
    )


def vote_phases(
    begins: Source | None, spans: Source | None, bins: range, bin_ns: int, votes: int, cursor_ns: int, exit_ns: int | None
) -> NDArray[np.intp]:
    """Return the phase that a rank was in for most of each bin, as known at the cursor; see NOT_YET and OTHER.

    Args:
        bins: numbers of the bins; bin 0 begins at the epoch.
        votes: moments in each bin at which the phase is looked up.
        exit_ns: when the rank exited, after which its phase is NOT_YET.
    """
    if begins is None or not bins:
        return np.full(len(bins), NOT_YET, np.intp)
    interval = bin_ns // votes
    moments = np.arange(bins.start * bin_ns + interval // 2, bins.stop * bin_ns, interval)
    codes = find_innermost(begins, spans, moments, cursor_ns)
    if exit_ns is not None:
        codes[moments > exit_ns] = NOT_YET
    kinds = len(PHASES) - NOT_YET
    known = np.where(codes < len(PHASES), codes, OTHER) - NOT_YET
    cells = known.reshape(len(bins), -1) + np.arange(0, len(bins) * kinds, kinds)[:, None]
    counts = np.bincount(cells.ravel(), minlength=len(bins) * kinds).reshape(len(bins), kinds)
    return np.asarray(counts.argmax(axis=1) + NOT_YET)


def resolve_innermost(
    begins: Source, ended: NDArray[Any] | None, open_phases: Sequence[OpenPhase], moments: Ints
) -> NDArray[np.int16]:
    """The same from the spans that ended since the first of the moments, and the phases in progress."""
    own = moments - begins.offset_ns
    found = np.full(len(own), NOT_YET, np.int16)
    found[own.searchsorted(begins.array["time_ns"][0]) :] = OTHER
    done = len(ended) if ended is not None else 0
    layers = np.empty((4, done + len(open_phases)), np.int64)
    depth, low, high, phase = layers
    if ended is not None:
        depth[:done], phase[:done] = ended["depth"], ended["phase"]
        low[:done], high[:done] = own.searchsorted(ended["begin_ns"]), own.searchsorted(ended["end_ns"])
    for place, one in enumerate(open_phases, done):
        layers[:, place] = one.depth, own.searchsorted(one.time_ns), len(own), one.phase
    # What lies deeper is painted over what it lies in.
    _, low, high, phase = layers[:, np.argsort(depth, kind="stable")]
    sizes = np.maximum(0, high - low)
    upto = sizes.cumsum()
    found[np.arange(sizes.sum()) + np.repeat(low - upto + sizes, sizes)] = np.repeat(phase, sizes)
    return found


def read_closed_spans(spans: Source | None, from_ns: int, cursor_ns: int) -> NDArray[Any] | None:
    """The spans that ended between a moment and the cursor."""
    if spans is None:
        return None
    return spans.between(from_ns, cursor_ns)
