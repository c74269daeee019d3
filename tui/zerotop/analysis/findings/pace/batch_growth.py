"""Batches or sequences grow by a plan: from what to what, what that costs, and whether time grows more than they do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.causes.allocator_calls import CALLING, MANY_CALLS, count_allocs
from zerotop.analysis.findings.support.causes.batch_causes import has_more_forwards, name_pass, read_forwards
from zerotop.analysis.findings.support.steps.growing_batches import (
    BatchHistory,
    GrowingBatches,
    get_batch_sizes,
)
from zerotop.analysis.findings.support.thresholds import MOST_UNIT_TIMES, SHORTEST_ITERATION_S
from zerotop.analysis.formatting import pluralize
from zerotop.recording.samples import Rows

_KIND = FindingKind(
    name="batch_growth",
    severity=Severity.INFO,
    confidence=0.95,
    headline="Steps grew from {size_before:,.0f} to {size_after:,.0f} {units} and take {after_s:seconds}"
    "[ instead of {earlier_s:seconds}][, {same}]",
    details="They grew {when}[, sequences from {length_before:,.0f} to"
    " {length_after:,.0f} tokens]: iterations take {times} as long for {sizes:.1f} times the {units}."
    " Time per {unit} {pace}.[ Memory peaks at {after_bytes:bytes} instead of {before_bytes:bytes}.]",
)
_NEW_BLOCKS = _KIND.with_changes(
    severity=Severity.WARNING,
    details=_KIND.details + " While they grew, steps took {growing_s:seconds} and called cudaMalloc {allocs_per_step:count"
    " time}: larger blocks do not fit into earlier ones. PyTorch reserved up to {reserved_bytes:bytes}[ of"
    " {device_bytes:bytes}].",
    advice=CALLING[0],
    fix=CALLING[1],
)
# Steps whose sizes differ by at most this share are measured together, or by more where sizes grow so fast that these are
# too few; the fewest and the most of them.
_ALIKE_SHARES, _FEWEST_STEPS, _MOST_STEPS = (0.05, 0.1, 0.2), 5, 50
# Growth that is told: by this share at first, by this share again, or any once the size has stayed for so many steps; and
# again each time it has stayed for twice as many.
_TOLD_SHARE, _STAYS_STEPS = 0.1, 20
# Jumps of the size that are told one by one: growth by a plan often has more.
_MOST_JUMPS = 3
# Time per token or row is unchanged up to this share, and time up to this one.
_SAME_SHARE, _SAME_TIME_SHARE = 0.1, 0.05


class _Told(NamedTuple):
    """The growth as it was told at the end of a step, with a size that had stayed for so many steps."""

    row: int
    size: int
    stays: int
    finding: Finding


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report the growth once it is known to be planned, and again with newer numbers."""
    history = BatchHistory.read(window.subject.lead)
    fresh = window.steps(history.rows)
    for told in window.extend(partial(_tell_next, window.subject, history, fresh), look_back=0):
        yield told.finding
    window.is_closed = bool(history.rows["has_varied"][-1:].any())


def _tell_next(group: Group, history: BatchHistory, fresh: slice, last: _Told | None) -> _Told | None:
    """Return the growth at the first of some steps at which it is to be told, after it was told last."""
    begin = fresh.start if last is None else max(fresh.start, last.row + 1)
    rows, levels = history.rows[begin : fresh.stop], history.levels
    if not len(levels):
        return None
    sizes, stays = levels["size"][rows["levels"] - 1], rows["step"] - levels["step"][rows["levels"] - 1]
    is_due = rows["is_planned"] & ~rows["has_varied"] & (sizes >= (1 + _TOLD_SHARE) * levels["size"][0])
    if last is not None:
        is_larger = (sizes >= (1 + _TOLD_SHARE) * last.size) | (stays >= _STAYS_STEPS)
        is_due &= np.where(sizes == last.size, stays >= max(_STAYS_STEPS, 2 * last.stays), is_larger)
    for index in np.flatnonzero(is_due).tolist():
        row = begin + index
        finding = _measure(group, history.after(row + 1), int(group.lead.phased_steps["end_unix_ns"][row]))
        if finding is not None:
            return _Told(row, int(sizes[index]), int(stays[index]), finding)
    return None


def _measure(group: Group, growth: GrowingBatches, known_ns: int) -> Finding | None:
    """Return the finding as known at the end of a step; None if too few steps have the first or the last size."""
    steps, phased = group.lead.steps_until(known_ns), group.lead.phased_steps_until(known_ns)
    end = int(steps["step"][-1])
    firsts, lasts = ([find(share) for share in _ALIKE_SHARES] for find in (growth.find_first, growth.find_last))
    first = next((step for step in firsts if len(_select(steps, 1, step)) >= _FEWEST_STEPS), None)
    last = next((step for step in lasts if len(_select(steps, step, end)) >= _FEWEST_STEPS), None)
    if first is None or last is None or first >= last:
        return None
    before, after = _select(steps, 1, first), _select(steps, last, end)
    sized = _select(phased, 1, first), _select(phased, last, end)
    seconds = [float(np.median(rows["iteration_s"])) for rows in (before, after)]
    unit, sizes = _name_unit(group.lead, *sized)
    if seconds[1] < SHORTEST_ITERATION_S:
        return None
    peaks = [float(np.median(rows["allocated_peak_bytes"])) for rows in sized]
    ratio, larger = seconds[1] / seconds[0], sizes[1] / sizes[0]
    excess, is_same = ratio / larger, abs(ratio - 1) <= _SAME_TIME_SHARE
    evidence: dict[str, float | None] = {"before_s": seconds[0], "after_s": seconds[1], "unit_times": excess}
    evidence |= {"size_before": sizes[0], "size_after": sizes[1], "grown_step": int(growth.first_steps[-1])}
    if min(peaks) > 0:
        evidence |= {"before_bytes": peaks[0], "after_bytes": peaks[1]}
    lengths = _find_lengths(*sized)
    growing = _select(steps, int(growth.last_steps[0]) + 1, int(growth.first_steps[-1]), most=len(steps))
    between = _select(phased, int(growth.last_steps[0]) + 1, int(growth.first_steps[-1]), most=len(phased))
    usual_sizes = _name_unit(group.lead, sized[0], between)[1] if len(between) else sizes
    # Time may grow with the square of a size, as that of attention, up to that of the largest steps.
    expected_s = max(seconds[0] * larger, min(seconds[1], seconds[0] * (usual_sizes[1] / usual_sizes[0]) ** 2))
    new_blocks = _measure_new_blocks(group.lead, growing, expected_s)
    kind = _NEW_BLOCKS if new_blocks else _KIND
    evidence |= new_blocks
    return kind.at_steps(
        group,
        steps[np.searchsorted(steps["step"], int(growth.last_steps[0]), "right") :],
        evidence,
        known_ns=known_ns,
        when=describe_jumps(growth),
        unit=unit,
        units=pluralize(2, unit),
        earlier_s=None if is_same else seconds[0],
        same="as before" if is_same else None,
        times="just" if is_same else f"{ratio:.1f} times",
        sizes=larger,
        pace=_describe_pace(excess),
        length_before=lengths[0],
        length_after=lengths[1],
        cost=evidence.get("lost_share") or 0.0,
        **{name: evidence.get(name) for name in ("before_bytes", "after_bytes")},
    )


def _measure_new_blocks(lead: Process, growing: Rows, expected_s: float) -> dict[str, float | None]:
    """Return what new blocks cost steps that grow, which take ``expected_s`` at most without them; nothing if little.

    Blocks are new to the allocator if each step calls cudaMalloc. Expandable segments grow instead.
    """
    allocs = count_allocs(lead, growing) if len(growing) >= _FEWEST_STEPS and not lead.has_expandable_segments else None
    seconds = float(np.median(growing["iteration_s"])) if len(growing) else 0.0
    if allocs is None or allocs < MANY_CALLS or seconds <= MOST_UNIT_TIMES * expected_s:
        return {}
    numbers = {"allocs_per_step": float(round(allocs)), "growing_s": seconds, "lost_share": 1 - expected_s / seconds}
    return numbers | {"reserved_bytes": int(growing["reserved_peak_bytes"].max()), "device_bytes": lead.device_bytes}


def _find_lengths(before: Rows, after: Rows) -> tuple[float | None, float | None]:
    """Return the usual tokens of a row, if steps have as many rows as before; None for both otherwise."""
    rows = [float(np.median(part["rows"])) for part in (before, after)]
    tokens = [float(np.median(part["tokens"])) for part in (before, after)]
    is_known = min(rows) > 0 and min(tokens) > 0 and abs(rows[1] - rows[0]) <= _SAME_SHARE * rows[0]
    return (tokens[0] / rows[0], tokens[1] / rows[1]) if is_known else (None, None)


def _select(rows: Rows, first: int, last: int, most: int = _MOST_STEPS) -> Rows:
    """Return the steps between two; of many the last ones, and of those that are known."""
    low, high = np.searchsorted(rows["step"], (first, last + 1))
    known: Rows = rows[low:high]
    known = known[~np.isnan(known["iteration_s"])]
    return known[-most:]


def _name_unit(process: Process, before: Rows, after: Rows) -> tuple[str, tuple[float, float]]:
    """Return what a step has more of: tokens or rows, or micro-batches or forwards that are as large as before."""
    sizes = [get_batch_sizes(rows) for rows in (before, after)]
    micro = tuple(float(np.median(rows["micro_steps"])) for rows in (before, after))
    size = float(np.median(sizes[0])), float(np.median(sizes[1]))
    if micro[0] > 0 and abs(size[1] / micro[1] - size[0] / micro[0]) <= _SAME_SHARE * size[0] / micro[0]:
        return name_pass(process.engine), (micro[0], micro[1])
    forwards = read_forwards(process, before), read_forwards(process, after)
    if has_more_forwards(*forwards):
        return "forward", (forwards[0].number, forwards[1].number)
    return ("token" if (after["tokens"] > 0).any() else "row"), size


def describe_jumps(growth: GrowingBatches) -> str:
    """Return ``at steps 150 and 300``, with the steps between which a jump was not recorded, if there are few."""
    jumps = list(zip(growth.last_steps[:-1].tolist(), growth.first_steps[1:].tolist(), strict=True))
    if len(jumps) > _MOST_JUMPS:
        return f"between steps {jumps[0][0]:,} and {jumps[-1][1]:,}"
    if all(new == old + 1 for old, new in jumps):
        *others, last = [f"{new:,}" for _, new in jumps]
        return f"at steps {', '.join(others)} and {last}" if others else f"at step {last}"
    places = [f"at step {new:,}" if new == old + 1 else f"between steps {old:,} and {new:,}" for old, new in jumps]
    return f"in {len(jumps)} jumps, {', '.join(f'one {place}' for place in places)}" if len(jumps) > 1 else places[0]


def _describe_pace(excess: float) -> str:
    if abs(excess - 1) <= _SAME_SHARE:
        return "is unchanged"
    return f"{'rose' if excess > 1 else 'fell'} by {abs(excess - 1):.0%}".replace("%", " %")
