"""Batches whose size changed when the iteration time did, on the lead rank or on another one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support.causes import step_change
from zerotop.analysis.findings.support.causes.code_causes import find_new_forward
from zerotop.analysis.findings.support.evidence import Group, Process, Rows
from zerotop.analysis.findings.support.steps.growing_batches import get_batch_sizes, name_size, read_growth
from zerotop.analysis.findings.support.thresholds import ABOUT_AS_MUCH
from zerotop.analysis.formatting import Text, format_count
from zerotop.analysis.script_terms import set_accumulation
from zerotop.analysis.stats.change_points import LEVEL_STEPS
from zerotop.analysis.stats.medians import compute_known_median
from zerotop.analysis.stats.wander import measure_order
from zerotop_probe.recording.events import EngineFacts
from zerotop_probe.recording.tables import EVAL

_GROUPS: step_change.Advice = (
    "Group samples of similar length: all ranks' batches then take similar time.",
    "{grouping_fix}",
)
LENGTH: step_change.Advice = (
    "If sequences are not meant to be longer, cut them as in the steps before.",
    "truncation=True, max_length={length}",
)
ROWS: step_change.Advice = ("If steps are not meant to have more rows, keep the batch size of before.", "{batch_size_fix}")
_MICRO_STEPS = "If steps are not meant to have more micro-batches, accumulate over as many as before."
_FORWARDS = "See which code calls the model more often in each step."
# A micro-batch, or the batch of a forward, counts as unchanged if its rows change by less.
_SAME_SHARE = 0.1
# The batches of a rank stay as they are if their size changes by less.
_KEPT_SHARE = 0.02
# Forwards that train nothing: the fewest steps that show their number, in which share of the steps it is the usual one, and
# the part of the added time that they explain.
_FEWEST_OF_OTHERS, _STEADY_SHARE, _EXPLAINED_SHARE = 3, 0.8, 0.5
MICRO_BATCH = "micro-batch"
BATCH_GROWTH = "batch_growth"
"""The kind of findings about batches that grow by a plan."""
# A change of the iterations is found at most one step early.
_LATE_STEPS = 2
# If sizes vary: the most steps with phases that show the usual size before a change, the fewest after it, and in which share
# of all pairs of two the same one has the larger batch.
_MOST_STEPS, _FEWEST_STEPS, _ORDERED_SHARE = 100, 10, 0.7


def check_batch(change: step_change.StepChange) -> step_change.Cause | None:
    """Return the cause that the batch size changed: in tokens if the model takes tokens, else in rows."""
    is_one, begin = len(change.group.processes) == 1, int(change.before["step"][-1])
    owner = "" if is_one else f"{name_owner(change.group, begin, change.step, change.latest_ns)} "
    cause = _compare_batches(change, change.process, _widen_parts(change), owner, LENGTH)
    if cause is not None and cause.advice != _FORWARDS:
        growth = read_growth(change.process, change.latest_ns)
        if growth.is_planned and growth.has_level(*_widen_steps(change)):
            return None
        cause = cause._replace(is_expected=cause.is_expected or growth.is_planned, finding=BATCH_GROWTH)
    # The larger batches are another change, with a finding of its own.
    return cause._replace(has_own_finding=True) if cause is not None and _changes_later(*change.phased) else cause


def name_pass(engine: EngineFacts) -> str:
    """Name what a step has several of: an optimizer such as L-BFGS runs its closure again, on the same batch."""
    return "pass" if any(one.class_ == "LBFGS" for one in engine.optimizers or ()) else MICRO_BATCH


def name_owner(group: Group, last_before: int, first_after: int, known_ns: int) -> str:
    """Return whose batches changed from one step to another: ``rank 0's`` if only the lead's did, else ``a rank's``."""
    others = [process for process in group.processes if process is not group.lead]
    name = name_size(group.lead.phased_steps_until(known_ns)[-LEVEL_STEPS:])
    if name is None or not others:
        return "a rank's"
    known = [process.phased_steps_until(known_ns) for process in others]
    is_alone = all(_keeps_size(rows, name, last_before, first_after) for rows in known)
    return f"rank {group.lead.rank}'s" if is_alone else "a rank's"


def _keeps_size(rows: Rows, name: str, last_before: int, first_after: int) -> bool:
    """Whether batches are known to have as many tokens or rows after a change as before."""
    first, end = np.searchsorted(rows["step"], [last_before + 1, first_after])
    before, after = (compute_known_median(part[name]) for part in (rows[:first][-LEVEL_STEPS:], rows[end:][:LEVEL_STEPS]))
    return before > 0 and abs(after - before) <= _KEPT_SHARE * before  # false for NaN


def _widen_steps(change: step_change.StepChange) -> tuple[int, int]:
    """Return a step just before a change and one just after it."""
    return int(change.before["step"][-1]) - _LATE_STEPS, int(change.after["step"][0]) + _LATE_STEPS


def is_by_plan(change: step_change.StepChange, cause: step_change.Cause | None) -> bool:
    """Whether a cause is that batches grow by a plan."""
    if cause is None or cause.finding != BATCH_GROWTH:
        return False
    return read_growth(change.process, change.latest_ns).is_planned


def check_other_batches(change: step_change.StepChange) -> step_change.Cause | None:
    """Return the cause that another rank's batch size changed, and the lead waits for it."""
    for process in change.group.processes:
        if process is not change.process:
            cause = _compare_batches(change, process, change.read_phased(process), f"rank {process.rank}'s ", _GROUPS)
            if cause is not None:
                # All wait for the rank with the most work.
                return cause._replace(is_expected=False, culprit=process)
    return None


def _widen_parts(change: step_change.StepChange) -> tuple[Rows, Rows]:
    """Return the steps with phases before and after. Where sizes vary: more of them, or none if these do not differ."""
    parts = change.phased
    if not all(len(rows) for rows in parts) or not _varies(parts[0]):
        return parts
    known = change.process.phased_steps_until(change.latest_ns)
    first, end = np.searchsorted(known["step"], [change.step, change.after["step"][-1] + 1])
    before, after = known[max(0, first - _MOST_STEPS) : first], known[first:end]
    sizes = [get_batch_sizes(part).astype(np.float64) for part in (before, after)]
    order = measure_order(sizes[0], sizes[1]) if len(before) and len(after) else 0.5
    is_clear = len(after) >= _FEWEST_STEPS and abs(order - 0.5) >= _ORDERED_SHARE - 0.5
    return (before, after) if is_clear else (before[:0], after[:0])


def _varies(rows: Rows) -> bool:
    sizes = get_batch_sizes(rows)
    return bool(np.ptp(sizes) > _SAME_SHARE * np.median(sizes))


def _compare_batches(
    change: step_change.StepChange, process: Process, parts: tuple[Rows, Rows], owner: str, advice: step_change.Advice
) -> step_change.Cause | None:
    tokens, rows = (_compute_growth(parts, name) for name in ("tokens", "rows"))
    growth = tokens or rows
    if growth is None:
        return None
    slower = np.log(change.after_s / change.before_s)
    larger = np.log(growth[1] / growth[0])
    if slower * larger <= 0 or abs(larger) < abs(slower) / 2:
        return None
    is_expected = bool(abs(slower) <= ABOUT_AS_MUCH * abs(larger))
    count = _compute_growth(parts, "micro_steps")
    if count is not None and _is_same_size(growth, count):
        unit = name_pass(change.process.engine)
        text = f"{owner}steps have {format_count(round(count[1]), unit)} instead of {count[0]:.0f}"
        if unit != MICRO_BATCH:
            return step_change.Cause(text, "", "", 0.8, is_expected=is_expected)
        fix = set_accumulation(change.process.engine, round(count[0]))
        # Less certain than a change of the training: an optimizer that calls a closure forwards and backwards more often.
        return step_change.Cause(text, _MICRO_STEPS, fix, 0.8, is_expected=is_expected)
    forwards = read_forwards(process, parts[0]), read_forwards(process, parts[1])
    if has_more_forwards(*forwards) or _is_same_size(growth, (forwards[0].number, forwards[1].number)):
        text = f"{owner}steps have {format_count(round(forwards[1].number), 'forward')} instead of {forwards[0].number:.0f}"
        return name_forward(change, step_change.Cause(text, _FORWARDS, "", 0.85, is_expected=is_expected))
    if rows is not None and abs(np.log(rows[1] / rows[0])) > abs(larger) / 2:
        text = f"{owner}steps have {format_count(round(rows[1]), 'row')} instead of {rows[0]:.0f}"
        return step_change.Cause(text, *ROWS, 0.9, is_expected=is_expected)
    text = f"{owner}batches have {growth[1]:.0f} tokens instead of {growth[0]:.0f}"
    lengths = parts[0]["tokens"] / np.maximum(1, parts[0]["rows"])
    fix = advice[1].replace("{length}", f"{np.ceil(lengths.max()):.0f}")
    return step_change.Cause(text, advice[0], fix, 0.9, is_expected=is_expected)


def check_other_forwards(change: step_change.StepChange) -> step_change.Cause | None:
    """Return the cause that steps run more forwards that train nothing, as a teacher's, and take longer for it."""
    before, after = (_measure_others(change.process, rows) for rows in change.phased)
    if before is None or after is None or not 0 <= before.number < after.number or change.added_s <= 0:
        return None
    if after.seconds - before.seconds < _EXPLAINED_SHARE * change.added_s:
        return None
    values = {"after": after.number, "before": before.number, "seconds": after.seconds, "usual": before.seconds}
    text = Text(
        "steps have {after:count forward} that train nothing instead of {before:.0f}, which take {seconds:seconds} instead"
        " of {usual:seconds}",
        values,
    )
    return name_forward(change, step_change.Cause(text, _FORWARDS, "", 0.85))


class _OtherForwards(NamedTuple):
    """The usual number of a step's forwards that train nothing, and their seconds."""

    number: float
    seconds: float


def _measure_others(process: Process, rows: Rows) -> _OtherForwards | None:
    """Return those outside of evaluations; None if too few steps are known, or their number varies."""
    if len(rows) < _FEWEST_OF_OTHERS:
        return None
    spans = process.read_phases(int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1]), "forward")
    is_other = (spans.rows["flags"] & EVAL != 0) & (spans.rows["depth"] == 0)
    ends, lengths = spans.times[is_other], (spans.times - process.compute_begins(spans))[is_other] / 1e9
    first, end = (np.searchsorted(ends, rows[name], "right") for name in ("begin_unix_ns", "end_unix_ns"))
    counts, sums = end - first, np.concatenate([[0.0], np.cumsum(lengths)])
    number = float(np.median(counts))
    if np.mean(counts == number) < _STEADY_SHARE:
        return None
    return _OtherForwards(number, float(np.median(sums[end] - sums[first])))


def name_forward(change: step_change.StepChange, cause: step_change.Cause) -> step_change.Cause:
    """Return the cause with the line of a further forward, if that is the cause and samples show the line by now."""
    if cause.advice != _FORWARDS or cause.line is not None or change.added_s <= 0:
        return cause
    line = find_new_forward(change, cause.culprit or change.process)
    return cause if line is None else cause._replace(line=line, fix=line.location)


class Forwards(NamedTuple):
    """The forwards of a model whose batch is known, in each step: their number, and the rows and tokens of the first one."""

    number: float
    rows: float
    tokens: float


def read_forwards(process: Process, rows: Rows) -> Forwards:
    """Return the usual forwards of these steps; zeros without any."""
    if not len(rows):
        return Forwards(0.0, 0.0, 0.0)
    spans = process.read_phases(int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1]), "forward").rows
    spans = spans[(spans["rows"] > 0) & (spans["flags"] & EVAL == 0)]
    spans = spans[np.argsort(spans["step"], kind="stable")]
    first, end = (np.searchsorted(spans["step"], rows["step"], side) for side in ("left", "right"))
    firsts = spans[first[end > first]]
    rows_of_first, tokens = (float(np.median(firsts[name])) if len(firsts) else 0.0 for name in ("rows", "tokens"))
    return Forwards(float(np.median(end - first)), rows_of_first, tokens)


def has_more_forwards(before: Forwards, after: Forwards) -> bool:
    """Whether steps have another number of forwards, and the first of them the same batch as before."""
    if not min(before.number, after.number) > 0 or before.number == after.number:
        return False
    return all(abs(one - other) <= _SAME_SHARE * abs(other) for one, other in zip(after[1:], before[1:], strict=True))


def _is_same_size(growth: tuple[float, float], count: tuple[float, float]) -> bool:
    """Whether there is another number of micro-batches, or forwards, each of which is as large as before."""
    if not min(count) > 0 or count[0] == count[1]:
        return False
    before, after = (size / number for size, number in zip(growth, count, strict=True))
    return abs(after - before) <= _SAME_SHARE * before


def _changes_later(before: Rows, after: Rows) -> bool:
    """Whether the first steps after a change still have the batch size of those before, and all others the new one."""
    old, sizes = get_batch_sizes(before), get_batch_sizes(after)
    new = float(np.median(sizes))
    is_old = np.abs(sizes - np.median(old)) < np.abs(sizes - new)
    first = int(np.argmin(is_old))
    varies = np.ptp(old) > _SAME_SHARE * abs(new - np.median(old))
    return first >= _LATE_STEPS and not varies and not is_old[first:].any()


def find_batch_step(change: step_change.StepChange, cause: step_change.Cause) -> int | None:
    """Return the step at which the batch size changed, if that is the cause; None if sizes vary or grow."""
    process = cause.culprit or change.process
    parts = change.phased if process is change.process else change.read_phased(process)
    if cause.advice not in (LENGTH[0], _GROUPS[0], ROWS[0], _MICRO_STEPS, _FORWARDS) or not all(len(part) for part in parts):
        return None
    rows = process.phased_steps_until(change.latest_ns)
    rows = rows[step_change.match_steps(rows, np.concatenate([change.before, change.after]))]
    before, after = (float(np.median(get_batch_sizes(part))) for part in parts)
    is_new = np.abs(get_batch_sizes(rows) - after) < np.abs(get_batch_sizes(rows) - before)
    first = len(rows) - int(np.argmin(is_new[::-1])) if not is_new.all() else 0
    if not 0 < first < len(rows) or is_new[:first].any():
        return None
    return int(rows["step"][first])


def describe_other_size(change: step_change.StepChange) -> Text | None:
    """Return how the batches of a step have changed, as a clause, where that is too little to explain a change."""
    parts = _widen_parts(change)
    for column in ("tokens", "rows"):
        growth = _compute_growth(parts, column)
        if growth is not None and abs(np.log(growth[1] / growth[0])) >= np.log1p(_SAME_SHARE):
            values = {"before": growth[0], "after": growth[1], "seen": int(parts[1]["step"][0]), "unit": column}
            return Text(
                "steps have {after:.0f} {unit} instead of {before:.0f}, first recorded in step {seen}, which alone does not"
                " explain it",
                values,
            )
    return None


def _compute_growth(parts: tuple[Rows, Rows], column: str) -> tuple[float, float] | None:
    """Return a figure of the batches before and after; None if it is unknown."""
    before, after = (float(np.median(rows[column])) if len(rows) else 0.0 for rows in parts)
    return (before, after) if before > 0 and after > 0 else None
