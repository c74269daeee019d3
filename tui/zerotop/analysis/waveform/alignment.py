"""Chooses the iterations to fold, and maps their moments to positions in the folded iteration.

Each phase of each iteration is stretched to its mean position: an iteration with a longer backward has its
backward where the others have theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.stats.change_points import ShiftFinder
from zerotop.recording.reader import Source
from zerotop.recording.samples import Floats, Ints, Rows
from zerotop.recording.steps.missing_steps import find_recorded
from zerotop.recording.steps.step_dtype import has_phases
from zerotop_probe.recording.tables import EVAL, PHASE_CODE

# Most iterations folded by default, and searched for the last change of level.
MOST_ITERATIONS = 1000
# Either skipped or updated iterations are folded: the kind of most of the last ones.
_LATEST = 3
# Iterations longer than this many medians are left out: the first ones compile, others pause for unrecorded reasons.
_LONG = 1.5
# The phase that is longer in them by about the difference, at least by this share of it, is named.
_MOST_OF_IT = 0.5
# So many last ones that each take this many medians are a level of their own, though too few to be found as one.
_FAR_STEPS, _FAR = 2, 10.0
# Steps that differ from the present pace by more than this share have another pace.
OTHER_PACE = 0.1
# Fewer of the present pace, or than a third, are folded alone only where the others differ by this share.
_FEWEST, _FAR_PACE = 3, 0.2
# By how much (natural logarithm) two shares of long iterations must be likelier than a single one.
_CERTAIN_RATE = 10.0
# The phases that the table of steps has.
_PARTS = ("data", "forward", "backward", "step")
# Share of the iterations that must have the same phases; otherwise only outermost phases are compared.
_ALIKE = 0.7
_OUTER = tuple(PHASE_CODE[name] for name in ("forward", "backward", "step"))


@dataclass(frozen=True, slots=True)
class LongIterations:
    """The iterations that are left out as far longer than others, only counted ones included."""

    count: int
    usual_share: float  # of the time of all iterations since the first folded one, if each took as long as their median
    iteration_s: float  # their median
    phase: str  # that takes most of the difference; empty if none does, or no phases of them were recorded
    longer_s: float  # by how much
    mean_s: float
    share: float  # of the time of all iterations since the first folded one


@dataclass(frozen=True)
class ChosenIterations:
    """The iterations to fold, and why others in between were left out."""

    indices: Ints  # among the rank's steps, ascending
    # "skipped" (or "updated", where skipped ones are folded), "evaluation", "checkpoint", "unrecorded", "counted", "pace",
    # "long"
    left_out: dict[str, int]
    skipped: bool  # whether the folded ones are those whose update was skipped
    long: LongIterations | None = None  # how "long" ones differ


def choose_iterations(steps: Rows, number: int | None) -> ChosenIterations:
    """Choose the last ``number`` of finished steps (oldest first), or with None all since the last change of level."""
    rows = steps[-(2 * MOST_ITERATIONS if number is None else 2 * number + MOST_ITERATIONS) :]
    offset = len(steps) - len(rows)
    skipped = bool(rows["skipped"][-_LATEST:].mean() > 0.5) if len(rows) else False
    reasons = _find_reasons(rows, skipped)
    fit = np.flatnonzero(reasons == "")
    seconds = np.asarray(rows["iteration_s"], np.float64)
    level = fit if number is not None else _choose_level(seconds, fit, reasons)
    fit = level[-(MOST_ITERATIONS if number is None else number) :]
    if not len(fit):
        return ChosenIterations(fit, {}, skipped)
    is_timed = (reasons == "") | (reasons == "counted")
    is_long = is_timed & _find_long(seconds, fit, is_timed)
    if number is None:  # iterations that are long more often, or no longer, have another pace
        timed = np.flatnonzero(is_timed)
        timed = timed[timed >= fit[0]]
        since = int(timed[find_rate_change(is_long[timed])])
        if np.count_nonzero((fit >= since) & ~is_long[fit]) >= _FEWEST:
            fit = fit[fit >= since]
            is_long = is_timed & _find_long(seconds, fit, is_timed)
    begin = int(fit[0])
    reasons[(reasons == "") & ~np.isin(np.arange(len(rows)), fit)] = "pace"
    reasons[is_long] = "long"
    fit = fit[~is_long[fit]]
    shown = reasons[begin:].tolist()
    left_out = {name: shown.count(name) for name in sorted(set(shown) - {""}, key=lambda name: (name == "long", name))}
    long = _measure_long(rows[begin:], np.flatnonzero(is_long[begin:]), fit - begin)
    return ChosenIterations(fit + offset, left_out, skipped, long)


def _measure_long(rows: Rows, long: Ints, folded: Ints) -> LongIterations | None:
    """Return how the long ones of these steps differ from the folded ones."""
    if not len(long):
        return None
    seconds, phased = rows["iteration_s"], long[has_phases(rows[long])]
    longer = {}
    if len(phased):
        parts = [{name: rows[f"{name}_s"][some] for name in _PARTS} for some in (phased, folded)]
        for part, some in zip(parts, (phased, folded), strict=True):
            part["other"] = seconds[some] - np.sum(list(part.values()), axis=0)
        longer = {name: float(np.median(parts[0][name]) - np.median(parts[1][name])) for name in parts[0]}
    long_s = float(np.median(seconds[long]))
    total_s, rest_s = len(long) * long_s, float(np.nansum(seconds) - seconds[long].sum())
    usual_share = total_s / (total_s + rest_s)
    added_s = long_s - float(np.median(seconds[folded])) if len(folded) else math.inf
    phase = next((name for name, one in longer.items() if _MOST_OF_IT < one / added_s < 1 / _MOST_OF_IT), "")
    sum_s = float(seconds[long].sum())
    mean_s, share = sum_s / len(long), sum_s / (sum_s + rest_s)
    return LongIterations(len(long), usual_share, long_s, phase, longer.get(phase, 0.0), mean_s, share)


def _find_reasons(rows: Rows, skipped: bool) -> NDArray[np.str_]:
    """Return why each step is left out; empty where it is folded."""
    reasons = np.full(len(rows), "", "<U12")
    reasons[rows["skipped"] != skipped] = "updated" if skipped else "skipped"
    reasons[rows["counted"]] = "counted"
    reasons[rows["checkpoint_s"] > 0] = "checkpoint"
    reasons[rows["eval_s"] > 0] = "evaluation"
    reasons[~find_recorded(rows)] = "unrecorded"
    return reasons


def _find_long(seconds: Floats, fit: Ints, is_timed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which steps are far longer than those to fold, and than all that were timed meanwhile."""
    meanwhile = seconds[fit[0] : fit[-1] + 1][is_timed[fit[0] : fit[-1] + 1]]
    is_long: NDArray[np.bool_] = seconds > _LONG * max(np.median(seconds[fit]), np.median(meanwhile))
    return is_long


def _choose_level(seconds: Floats, fit: Ints, reasons: NDArray[np.str_]) -> Ints:
    """Return those of ``fit`` since the last change of level, also one that only counted steps tell.

    Where their mean is not the pace of all steps since that change, only those near this pace; without any, the last ones
    between two changes, so that no two levels are mixed.
    """
    own: Ints = fit[_find_level_begin(seconds, fit) :]
    timed = np.flatnonzero((reasons == "") | (reasons == "counted"))
    if len(fit) == len(timed):
        return own
    begin = max(own[0], timed[_find_level_begin(seconds, timed)])
    pace_s = np.median(seconds[timed[timed >= begin]])
    away = np.abs(seconds[own] / pace_s - 1)
    usual = seconds[own][seconds[own] <= _LONG * max(np.median(seconds[own]), pace_s)]
    off, near = abs(np.mean(usual) / pace_s - 1), np.count_nonzero((own >= begin) & (away <= OTHER_PACE))
    if off <= OTHER_PACE or (off <= _FAR_PACE and near < max(_FEWEST, len(own) / 3)):
        return own
    for most in (OTHER_PACE, _LONG - 1):
        now: Ints = own[(own >= begin) & (away <= most)]
        if len(now):
            return now
    firsts = [timed[shift.first] for shift in ShiftFinder().find_shifts(seconds[timed])]
    levels = [level for level in np.split(own, np.searchsorted(own, firsts)) if len(level) >= _FEWEST]
    return levels[-1] if levels else own


def find_rate_change(is_long: NDArray[np.bool_]) -> int:
    """Return the index at which the share of long ones last changed for certain; 0 if it never did."""
    begin = 0
    while len(is_long) - begin > 1:
        long_count = np.cumsum(is_long[begin:], dtype=np.int64)
        size = np.arange(1, len(long_count) + 1)
        before = _measure_likelihood(long_count[:-1], size[:-1])
        after = _measure_likelihood(long_count[-1] - long_count[:-1], size[-1] - size[:-1])
        gain = before + after - _measure_likelihood(long_count[-1:], size[-1:])
        place = int(np.argmax(gain))
        if gain[place] < _CERTAIN_RATE:
            break
        begin += place + 1
    return begin


def _measure_likelihood(count: Ints, size: Ints) -> Floats:
    """Return the highest logarithm of the likelihood of ``count`` among ``size``."""
    share = count / size
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = np.nan_to_num(count * np.log(share)) + np.nan_to_num((size - count) * np.log(1 - share))
    likelihood: Floats = np.asarray(parts, np.float64)
    return likelihood


def _find_level_begin(seconds: Floats, fit: Ints) -> int:
    """Return the index into ``fit`` at which the last change of level begins."""
    firsts = [shift.first for shift in ShiftFinder().find_shifts(seconds[fit])]
    begin = firsts[-1] if firsts else 0
    level = seconds[fit[begin:]]
    usual = np.flatnonzero(level <= _FAR * np.median(level)) if len(level) else np.empty(0, np.int64)
    far = len(level) - 1 - int(usual[-1]) if len(usual) else 0
    return begin + len(level) - far if far >= _FAR_STEPS else begin


@dataclass(frozen=True, eq=False)
class PhaseStretch:
    """A phase of the folded iteration, in seconds from its begin. Phases of depth 1 are nested in others."""

    phase: int  # index into PHASES
    depth: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, eq=False)
class AlignedIterations:
    """The iterations of one rank process that have the same phases, and the times of their boundaries."""

    source: Source
    indices: Ints  # among the rank's steps
    bounds: Floats  # (iterations, boundaries), seconds since ``base_ns``: begin, begins and ends of phases, end
    base_ns: int  # unix time
    order: Ints  # which of a span's edges each inner boundary is: 2 * span + (1 for its end)
    phases: NDArray[np.uint16]  # (spans,) of each iteration, by begin
    depths: NDArray[np.uint8]
    spans: NDArray[Any]  # (iterations, spans) of the recording

    @property
    def span_durations(self) -> Floats:
        """Seconds of each span, shape (iterations, spans)."""
        return np.asarray(self.spans["end_ns"] - self.spans["begin_ns"], np.float64) / 1e9

    @property
    def mean_bounds(self) -> Floats:
        """Mean position of each boundary, in seconds from the begin of its iteration: means of phases add up to it."""
        positions: Floats = (self.bounds - self.bounds[:, :1]).mean(axis=0)
        return positions

    def build_stretches(self, reference: Floats) -> list[PhaseStretch]:
        """Return the phases of the folded iteration, by begin."""
        edges = np.empty((len(self.phases), 2))
        edges.ravel()[self.order] = reference[1:-1]
        columns = (self.phases.tolist(), self.depths.tolist(), edges[:, 0].tolist(), edges[:, 1].tolist())
        return [PhaseStretch(*values) for values in zip(*columns, strict=True)]

    def fold_windows(self, begins_ns: Ints, ends_ns: Ints, reference: Floats) -> tuple[NDArray[np.bool_], Floats, Floats]:
        """Map windows of unix time to the folded iteration; return (mask of those mapped, their begins, their lengths).

        Windows that reach into iterations that are not folded are left out.
        """
        begins, ends = (begins_ns - self.base_ns) / 1e9, (ends_ns - self.base_ns) / 1e9
        first = np.searchsorted(self.bounds[:, 0], begins, "right") - 1
        last = np.minimum(np.searchsorted(self.bounds[:, -1], ends, "left"), len(self.bounds) - 1)
        whole = (first >= 0) & (ends <= self.bounds[-1, -1])
        first = np.maximum(first, 0)
        whole &= (begins < self.bounds[first, -1]) & (self.indices[last] - self.indices[first] == last - first)
        length = float(reference[-1])
        unrolled = (np.arange(len(self.bounds))[:, None] * length + reference).ravel()
        flat = self.bounds.ravel()
        positions = np.interp(begins[whole], flat, unrolled)
        lengths = np.interp(ends[whole], flat, unrolled) - positions
        return whole, positions - np.floor(positions / length) * length, lengths


def align_iterations(source: Source, steps: Rows, indices: Ints) -> AlignedIterations | None:
    """Align the chosen iterations of a rank process; None if there are none."""
    if not len(indices):
        return None
    rows = steps[indices]
    begins, ends = rows["begin_unix_ns"] - source.offset_ns, rows["end_unix_ns"] - source.offset_ns
    spans = source.between(int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1]))
    spans = spans[(spans["flags"] & EVAL == 0) & (spans["engine"] == 0) & (spans["phase"] != PHASE_CODE["init"])]
    spans = spans[np.lexsort((spans["depth"], -spans["end_ns"], spans["begin_ns"]))]
    iteration = np.searchsorted(ends, spans["end_ns"], "left")
    known = (iteration < len(ends)) & (spans["begin_ns"] >= begins[np.minimum(iteration, len(ends) - 1)])
    spans, iteration = spans[known], iteration[known]
    for detail in (np.ones(len(spans), np.bool_), spans["depth"] == 0, np.isin(spans["phase"], _OUTER)):
        alike, alike_spans = _choose_alike(spans[detail], iteration[detail], len(ends))
        if len(alike) >= _ALIKE * len(ends):
            break
    return _build_aligned(source, indices[alike], begins[alike], ends[alike], alike_spans)


def _choose_alike(spans: NDArray[Any], iteration_index: Ints, count: int) -> tuple[Ints, NDArray[Any]]:
    """Return the iterations with the most common phases, and their spans, shape (iterations, spans)."""
    numbers = np.bincount(iteration_index, minlength=count)
    usual = int(np.bincount(numbers).argmax())
    alike = np.flatnonzero(numbers == usual)
    alike_spans = spans[np.isin(iteration_index, alike)].reshape(len(alike), usual)
    if usual:
        shapes = alike_spans["phase"].astype(np.int64) * 256 + alike_spans["depth"]
        kinds, kind = np.unique(shapes, axis=0, return_inverse=True)
        same = kind.ravel() == np.bincount(kind.ravel(), minlength=len(kinds)).argmax()
        alike, alike_spans = alike[same], alike_spans[same]
    return alike, alike_spans


def _build_aligned(source: Source, indices: Ints, begins: Ints, ends: Ints, spans: NDArray[Any]) -> AlignedIterations:
    phases, depths = spans["phase"][0], spans["depth"][0]
    order = np.array(_order_edges(depths.tolist()), np.int64)
    edges = np.stack((spans["begin_ns"], spans["end_ns"]), axis=2).reshape(len(spans), -1)[:, order]
    base = int(begins[0])
    bounds = np.column_stack((begins, edges, ends)) - base
    # Clocks never go back, but a boundary without length may be recorded twice.
    bounds = np.maximum.accumulate(bounds, axis=1)
    return AlignedIterations(source, indices, bounds / 1e9, base + source.offset_ns, order, phases, depths, spans)


def _order_edges(depths: list[int]) -> list[int]:
    """Return the edges of nested spans in order of time: 2 * span for a begin, 2 * span + 1 for an end."""
    edges: list[int] = []
    open_spans: list[int] = []
    for span, depth in enumerate(depths):
        while open_spans and depths[open_spans[-1]] >= depth:
            edges.append(2 * open_spans.pop() + 1)
        edges.append(2 * span)
        open_spans.append(span)
    return edges + [2 * span + 1 for span in reversed(open_spans)]
