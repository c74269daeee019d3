"""Evaluations take a large share of the time because they come often."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support.evidence import Evidence, Group, Rows
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.analysis.findings.support.lines.line_findings import await_lines, line_values
from zerotop.analysis.findings.support.lines.stack_lines import Delay

_KIND = FindingKind(
    name="evaluations_often",
    severity=Severity.WARNING,
    confidence=0.9,
    headline="Evaluations take {share:percent} of the time: one each {period:.0f} steps[: {place}]",
    details=(
        "{evaluations:count evaluation} since step {step} took {total_s:seconds}[, mostly at {line}][; before, there was one"
        " each {earlier:.0f} steps]. Iterations take {iteration_s:seconds}."
    ),
    advice="Evaluate less often, or on fewer batches.",
)
# Evaluations that show it, and their share of the time; where they came half as often before, less is enough.
_FEWEST, _LEAST_SHARE, _MORE_OFTEN_SHARE, _MORE_OFTEN_TIMES = 6, 0.15, 0.08, 2.0


class _Often(NamedTuple):
    delay: Delay
    rows: Rows
    evidence: dict[str, float | None]


def detect(recording: Evidence) -> Iterator[Finding]:
    """Report the first such evaluations of each attempt, and again with each doubling of their number."""
    for group in recording.groups:
        for often, found in await_lines(group, _KIND.name, _find_often(group), lambda often: often.delay):
            values, share = line_values(found.line), often.evidence["share"] or 0.0
            values["earlier"] = often.evidence.get("earlier")
            yield _KIND.at_steps(group, often.rows, often.evidence, known_ns=found.known_ns, cost=share, **values)


class _State:
    steps_read, due, begin = 0, _FEWEST, -1  # begin: the first of those that were reported, as an index

    def __init__(self) -> None:
        self.indexes: list[int] = []  # of the steps before which there was an evaluation


def _find_often(group: Group) -> Iterator[_Often]:
    state, steps = group.get_state(_State, _KIND.name), group.lead.steps
    fresh = np.flatnonzero(steps["eval_s"][state.steps_read :] > 0) + state.steps_read
    state.steps_read = len(steps)
    for index in fresh.tolist():
        state.indexes.append(index)
        count = len(state.indexes) - max(0, state.begin)
        if count >= state.due and (often := _measure(group, steps, state)) is not None:
            state.due = 2 * count
            yield often


def _measure(group: Group, steps: Rows, state: _State) -> _Often | None:
    """Return the last evaluations if they take much of the time; once reported, all since the first of these."""
    first = state.begin if state.begin >= 0 else len(state.indexes) - _FEWEST
    indexes, before = state.indexes[first:], state.indexes[: first + 1]
    rows = steps[indexes[0] : indexes[-1] + 1]
    seconds = float(steps["eval_s"][indexes[1:]].sum())
    iterations = float(np.nansum(rows["iteration_s"][1:]))
    share, period = seconds / (seconds + iterations), float(np.median(np.diff(indexes)))
    earlier = float(np.median(np.diff(before))) if len(before) > 2 else None
    is_more_often = earlier is not None and earlier >= _MORE_OFTEN_TIMES * period
    if period < 2 or share < (_MORE_OFTEN_SHARE if is_more_often else _LEAST_SHARE):
        return None
    state.begin = first
    evidence: dict[str, float | None] = {
        "share": share,
        "period": period,
        "evaluations": float(len(indexes)),
        "total_s": seconds,
    }
    evidence |= {"iteration_s": float(np.nanmedian(rows["iteration_s"])), "earlier": earlier if is_more_often else None}
    begin_ns = int(rows["begin_unix_ns"][0] - 1e9 * steps["eval_s"][indexes[0]])
    known_ns = int(rows["end_unix_ns"][-1])
    return _Often(Delay(group.lead, "eval", begin_ns, known_ns, known_ns, is_all_work=True), rows, evidence)
