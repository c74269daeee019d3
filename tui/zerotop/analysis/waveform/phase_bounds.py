"""How long each phase of the folded iterations takes, on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.processes.alive_ranks import find_sibling_table
from zerotop.analysis.waveform.alignment import AlignedIterations, PhaseStretch
from zerotop.session.reader import Session
from zerotop_probe.recording.tables import PHASES

Floats = NDArray[np.float64]

OTHER = "other"


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """A phase of the folded iterations, all its spans in one together. Seconds; NaN where not recorded."""

    phase: str
    depth: int
    span_count: int  # spans in an iteration: one for each micro-step
    median_s: float
    p90_s: float
    share: float  # of the iteration
    device_s: float  # median time on the device
    intervals: tuple[tuple[float, float], ...]  # where in the folded iteration: begins and ends


def build_phase_rows(
    session: Session, parts: Sequence[AlignedIterations], stretches: Sequence[PhaseStretch], iteration_s: float
) -> tuple[PhaseRow, ...]:
    """The phases in the order in which they begin, each followed by those within it, and last what lies between them."""
    device = [_read_device_seconds(session, part) for part in parts]
    kinds: dict[tuple[int, ...], list[int]] = {}
    above: list[int] = []
    for place, stretch in enumerate(stretches):
        above = [*above[: stretch.depth], stretch.phase]
        kinds.setdefault(tuple(above), []).append(place)
    order = sorted(kinds, key=lambda kind: [kinds.get(kind[: depth + 1], [0])[0] for depth in range(len(kind))])
    rows = []
    for kind in order:
        which = kinds[kind]
        seconds = np.concatenate([part.span_durations[:, which].sum(axis=1) for part in parts])
        on_device = np.concatenate([times[:, which].sum(axis=1) for times in device])
        places = tuple((stretches[place].begin_s, stretches[place].end_s) for place in which)
        depth = stretches[which[0]].depth
        rows.append(_build_row(find_phase_name(kind[-1]), depth, len(which), seconds, on_device, iteration_s, places))
    outer = [place for place, stretch in enumerate(stretches) if stretch.depth == 0]
    left = [part.bounds[:, -1] - part.bounds[:, 0] - part.span_durations[:, outer].sum(axis=1) for part in parts]
    seconds = np.maximum(np.concatenate(left), 0.0)
    between = _find_gaps([stretches[place] for place in outer], iteration_s)
    return (*rows, _build_row(OTHER, 0, 1, seconds, np.full(1, np.nan), iteration_s, between))


def find_phase_name(phase: int) -> str:
    """A phase by its code; one that only a newer version knows is some other."""
    return PHASES[phase] if phase < len(PHASES) else OTHER


def _build_row(
    phase: str,
    depth: int,
    span_count: int,
    seconds: Floats,
    on_device: Floats,
    iteration_s: float,
    intervals: tuple[tuple[float, float], ...],
) -> PhaseRow:
    median, known = float(np.median(seconds)), on_device[np.isfinite(on_device)]
    share = median / iteration_s if iteration_s > 0 else 0.0
    device = float(np.median(known)) if len(known) else float("nan")
    return PhaseRow(phase, depth, span_count, median, float(np.quantile(seconds, 0.9)), share, device, intervals)


def _find_gaps(outer: Sequence[PhaseStretch], iteration_s: float) -> tuple[tuple[float, float], ...]:
    begins = [*(stretch.begin_s for stretch in outer), iteration_s]
    ends = [0.0, *(stretch.end_s for stretch in outer)]
    return tuple((end, begin) for end, begin in zip(ends, begins, strict=True) if begin > end)


def _read_device_seconds(session: Session, part: AlignedIterations) -> Floats:
    """Seconds on the device of each span, shape (iterations, spans); NaN where it was not measured."""
    found = np.full(part.spans.shape, np.nan)
    source = find_sibling_table(session, "device_times", part.source)
    if source is None or not part.spans.size:
        return found
    rows = _find_device_rows(source.array, part.spans)
    wanted = part.spans["begin_ns"] * 16 + part.spans["depth"]
    keys = rows["begin_ns"] * 16 + rows["depth"]
    order = np.argsort(keys, kind="stable")
    at = np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)
    if len(keys):
        same = keys[order[at]] == wanted
        found[same] = rows["device_ns"][order[at]][same] / 1e9
    return found


def _find_device_rows(rows: NDArray[Any], spans: NDArray[Any]) -> NDArray[Any]:
    """The device times that may be of these spans: they are learnt some time after."""
    first = np.searchsorted(rows["time_ns"], spans["begin_ns"].min())
    found: NDArray[Any] = rows[first:]
    mine: NDArray[Any] = found[found["begin_ns"] <= spans["begin_ns"].max()]
    return mine
