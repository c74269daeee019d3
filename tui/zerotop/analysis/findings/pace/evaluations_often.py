"""Evaluations take a large share of the time because they come often."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, in_each_attempt
from zerotop.analysis.findings.support.lines.line_findings import line_values
from zerotop.analysis.findings.support.lines.stack_lines import Delay, await_line
from zerotop.analysis.findings.support.links import Kinds, is_simultaneous
from zerotop.analysis.findings.support.steps.lost_time import count_rarer_steps
from zerotop.analysis.script_terms import set_interval
from zerotop.analysis.stats.change_points import LEVEL_STEPS
from zerotop.recording.samples import Rows

_KIND = FindingKind(
    name="evaluations_often",
    confidence=0.9,
    headline="From step {step} on, evaluations take {share:percent} of the time: one {each}[: {place}]",
    details=(
        "{evaluations:count evaluation} in steps {step} to {last_step} took {total_s:seconds}[, mostly at {line}][; before,"
        " there was one each {earlier:.0f} steps]. Iterations take {iteration_s:seconds}."
    ),
    advice="Evaluate every {rarer:,.0f} steps: that takes at most {rare:percent} of the time. Or evaluate on fewer batches.",
    fix="[{setting}]",
    superseded_by=(Kinds(is_simultaneous, "evaluation_growth"),),
)
# An evaluation before each step may be a part of it, as where a policy plays or a model labels its own batches.
_EACH = _KIND.with_changes(
    confidence=0.7,
    advice=(
        "If training does not need their results, evaluate every {rarer:,.0f} steps: that takes at most {rare:percent} of"
        " the time. Or evaluate on fewer batches."
    ),
)
# The share of the time that evaluations may take.
_RARE_SHARE = 0.05
# Evaluations that show it, and their share of the time; where they came half as often before, less is enough.
_FEWEST, _LEAST_SHARE, _MORE_OFTEN_SHARE, _MORE_OFTEN_TIMES = 6, 0.15, 0.08, 2.0


class _Often(NamedTuple):
    begin: int  # number of the first evaluation
    evaluations: int
    delay: Delay
    rows: Rows
    evidence: dict[str, float | None]


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report the first such evaluations of each attempt, and again with each doubling of their number."""
    for often, found in window.await_each(_find_often(window), lambda often: await_line(often.delay)):
        values, share = line_values(found.line), often.evidence["share"] or 0.0
        rarer = count_rarer_steps(often.evidence["period"] or 1.0, share, _RARE_SHARE)
        values |= {"rare": _RARE_SHARE, "rarer": rarer, "earlier": often.evidence.get("earlier")}
        values["last_step"] = int(often.rows["step"][-1])
        period = often.evidence["period"] or 1.0
        kind, values["each"] = (_EACH, "before each step") if period < 2 else (_KIND, f"each {period:.0f} steps")
        # A callback that evaluates by itself heeds no setting of the Trainer.
        is_own = found.line is not None and not any("evaluat" in name for name in found.line.callees)
        values["setting"] = None if is_own else set_interval(window.subject.engine, "eval", rarer) or None
        yield kind.at_steps(window.subject, often.rows, often.evidence, known_ns=found.known_ns, cost=share, **values)


def _find_often(window: SearchWindow[Group]) -> Iterator[_Often]:
    lead, steps = window.subject.lead, window.subject.lead.steps
    new = window.steps(steps)
    fresh = (np.flatnonzero(steps["eval_s"][new] > 0) + new.start).tolist()  # steps before which there was an evaluation
    indexes = window.results(fresh, None)
    yield from window.extend(partial(_find_next, lead, indexes, len(indexes) - len(fresh)), 0)


def _find_next(lead: Process, indexes: list[int], searched: int, last: _Often | None) -> _Often | None:
    """Return the next evaluations to report, with one of those behind the ``searched`` ones as their last."""
    due = _FEWEST if last is None else last.begin + 2 * last.evaluations
    ends = range(max(due, searched + 1), len(indexes) + 1)
    found = (_measure(lead, indexes[:end], end - _FEWEST if last is None else last.begin) for end in ends)
    return next((one for one in found if one is not None), None)


def _measure(lead: Process, indexes: list[int], begin: int) -> _Often | None:
    """Return the evaluations from number ``begin`` on if they take much of the time.

    Those before each step count only if many steps were made without one before: else they may be a part of each.
    """
    if np.median(np.diff(indexes[begin:])) < 2:
        begin = _find_series(indexes, begin)
        made = indexes[begin] - (indexes[begin - 1] if begin else 0)
        if min(made, len(indexes) - begin) < LEVEL_STEPS:
            return None
    before, indexes, steps = indexes[: begin + 1], indexes[begin:], lead.steps
    rows = steps[indexes[0] : indexes[-1] + 1]
    seconds = float(steps["eval_s"][indexes[1:]].sum())
    iterations = float(np.nansum(rows["iteration_s"][1:]))
    share, period = seconds / (seconds + iterations), float(np.median(np.diff(indexes)))
    earlier = float(np.median(np.diff(before))) if len(before) > 2 else None
    is_more_often = earlier is not None and earlier >= _MORE_OFTEN_TIMES * period
    if share < (_MORE_OFTEN_SHARE if is_more_often else _LEAST_SHARE):
        return None
    evidence: dict[str, float | None] = {
        "share": share,
        "period": period,
        "evaluations": float(len(indexes)),
        "total_s": float(steps["eval_s"][indexes].sum()),
    }
    evidence |= {"iteration_s": float(np.nanmedian(rows["iteration_s"])), "earlier": earlier if is_more_often else None}
    begin_ns = int(rows["begin_unix_ns"][0] - 1e9 * steps["eval_s"][indexes[0]])
    known_ns = int(rows["end_unix_ns"][-1])
    return _Often(begin, len(indexes), Delay(lead, "eval", begin_ns, known_ns, known_ns, is_all_work=True), rows, evidence)


def _find_series(indexes: list[int], number: int) -> int:
    """Return the number of the first of the evaluations before consecutive steps, of which one has this number."""
    while number and indexes[number] - indexes[number - 1] == 1:
        number -= 1
    return number
