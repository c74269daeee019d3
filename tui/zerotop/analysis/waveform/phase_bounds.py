"""The durations of the phases of the folded iterations, on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.processes.phases import find_phase_name
from zerotop.analysis.waveform.alignment import AlignedIterations, PhaseStretch
from zerotop.recording.moments.moment import find_sibling_table
from zerotop.recording.reader import Recording
from zerotop.recording.samples import Floats

OTHER = "other"


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """A phase of the folded iterations, with all its spans in an iteration. Seconds; NaN where not recorded."""

    phase: str
    depth: int
    span_count: int  # in an iteration: one for each micro-step
    mean_s: float  # those of the outermost phases and OTHER add up to the iteration
    p90_s: float
    share: float  # of the time of all folded iterations
    device_s: float  # mean time on the device: of iterations where it was measured, for the mean of all
    intervals: tuple[tuple[float, float], ...]  # (begin, end) of each span in the folded iteration


def build_phase_rows(
    recording: Recording, parts: Sequence[AlignedIterations], stretches: Sequence[PhaseStretch], iteration_s: float
) -> tuple[PhaseRow, ...]:
    """Return the phases by begin, each followed by its nested ones; the last is OTHER, the time between phases."""
    device = [_read_device_seconds(recording, part) for part in parts]
    kinds: dict[tuple[int, ...], list[int]] = {}
    above: list[int] = []
    for index, stretch in enumerate(stretches):
        above = [*above[: stretch.depth], stretch.phase]
        kinds.setdefault(tuple(above), []).append(index)
    order = sorted(kinds, key=lambda kind: [kinds.get(kind[: depth + 1], [0])[0] for depth in range(len(kind))])
    lengths = [part.bounds[:, -1] - part.bounds[:, 0] for part in parts]
    whole_s = float(sum(length.sum() for length in lengths))
    rows = []
    for kind in order:
        spans = kinds[kind]
        seconds = np.concatenate([part.span_durations[:, spans].sum(axis=1) for part in parts])
        on_device = np.concatenate([times[:, spans].sum(axis=1) for times in device])
        intervals = tuple((stretches[span].begin_s, stretches[span].end_s) for span in spans)
        depth = stretches[spans[0]].depth
        rows.append(build_row(find_phase_name(kind[-1]), depth, len(spans), seconds, on_device, whole_s, intervals))
    outer = [index for index, stretch in enumerate(stretches) if stretch.depth == 0]
    rest = [length - part.span_durations[:, outer].sum(axis=1) for length, part in zip(lengths, parts, strict=True)]
    seconds = np.maximum(np.concatenate(rest), 0.0)
    gaps = _find_gaps([stretches[span] for span in outer], iteration_s)
    return (*rows, build_row(OTHER, 0, 1, seconds, np.full(len(seconds), np.nan), whole_s, gaps))


def build_row(
    phase: str,
    depth: int,
    span_count: int,
    seconds: Floats,
    on_device: Floats,
    whole_s: float,
    intervals: tuple[tuple[float, float], ...],
) -> PhaseRow:
    known = np.isfinite(on_device)
    share = float(seconds.sum()) / whole_s if whole_s > 0 else 0.0
    mean, device = float(seconds.mean()), float("nan")
    if known.any():
        # Few may have been measured, and those may have been longer than others on the host, too.
        measured = float(seconds[known].mean())
        device = float(on_device[known].mean()) * (mean / measured if measured > 0 else 1.0)
    return PhaseRow(phase, depth, span_count, mean, float(np.quantile(seconds, 0.9)), share, device, intervals)


def _find_gaps(outer: Sequence[PhaseStretch], iteration_s: float) -> tuple[tuple[float, float], ...]:
    begins = [*(stretch.begin_s for stretch in outer), iteration_s]
    ends = [0.0, *(stretch.end_s for stretch in outer)]
    return tuple((end, begin) for end, begin in zip(ends, begins, strict=True) if begin > end)


def _read_device_seconds(recording: Recording, part: AlignedIterations) -> Floats:
    """Return the seconds on the device of each span, shape (iterations, spans); NaN where not measured."""
    seconds = np.full(part.spans.shape, np.nan)
    source = find_sibling_table(recording, "device_times", part.source)
    if source is None or not part.spans.size:
        return seconds
    rows = _find_device_rows(source.array, part.spans)
    wanted = part.spans["begin_ns"] * 16 + part.spans["depth"]
    keys = rows["begin_ns"] * 16 + rows["depth"]
    order = np.argsort(keys, kind="stable")
    at = np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)
    if len(keys):
        same = keys[order[at]] == wanted
        seconds[same] = rows["device_ns"][order[at]][same] / 1e9
    return seconds


def _find_device_rows(rows: NDArray[Any], spans: NDArray[Any]) -> NDArray[Any]:
    """Return the device times that may belong to these spans: each is recorded some time after its span."""
    later: NDArray[Any] = rows[np.searchsorted(rows["time_ns"], spans["begin_ns"].min()) :]
    belonging: NDArray[Any] = later[later["begin_ns"] <= spans["begin_ns"].max()]
    return belonging
