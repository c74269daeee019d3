"""Each evaluation takes longer than the one before, for example because outputs or metrics are never cleared."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, in_each_attempt
from zerotop.analysis.findings.support.lines.line_findings import is_cause, line_values, name_line
from zerotop.analysis.findings.support.lines.stack_lines import Delay, await_line, is_training
from zerotop.recording.samples import Floats, Rows

_KIND = FindingKind(
    name="evaluation_growth",
    confidence=0.85,
    headline="Each evaluation takes {added_s:seconds} longer: {first_s:seconds} became {last_s:seconds}",
    details=(
        "{evaluations:count evaluation} since step {step} took {share:percent} of the time[, the last ones mostly at"
        " {line}]. Iterations took {iteration_s:seconds} throughout."
    ),
    advice="Clear what evaluations collect, such as outputs and metrics: each one may go through those of all earlier ones.",
)
# Evaluations that show growth, the share of their pairs in which the later one took longer, and how much longer the last
# took than the first, in seconds, and as a factor: also beyond what iterations became slower by.
_FEWEST, _PAIRS_SHARE = 6, 0.9
_GROWN_S, _TIMES_AS_LONG = 0.1, 1.5
# What they take of the time.
_LEAST_SHARE = 0.05


# The last evaluations are examined again after this share of more ones, so that the work grows linearly with the recording.
_MOST, _MORE = 24, 1 / 8


class _Growth(NamedTuple):
    """Evaluations before some steps."""

    delay: Delay
    rows: Rows
    evidence: dict[str, float]
    lost_share: float  # of the time


@in_each_attempt()
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report the first growth of each attempt."""
    growth = window.find_once(partial(_find_growth, window))
    found = await_line(growth.delay) if growth is not None else None
    if growth is not None and found is not None:
        line, kind = found.line, _KIND
        if line is not None and is_cause(line, growth.delay) and not is_training(line.callees, "eval"):
            kind = name_line(kind, line).with_changes(advice=_KIND.advice)
        rows, evidence, values = growth.rows, growth.evidence, line_values(line)
        yield kind.at_steps(window.subject, rows, evidence, known_ns=found.known_ns, cost=growth.lost_share, **values)


def _find_growth(window: SearchWindow[Group]) -> _Growth | None:
    steps = window.subject.lead.steps
    fresh = window.steps(steps)
    new = (fresh.start + np.flatnonzero(steps["eval_s"][fresh] > 0)).tolist()
    indexes = window.results(new, None)  # of the steps before which there was an evaluation
    due = [count for count in range(len(indexes) - len(new) + 1, len(indexes) + 1) if _is_due(count)]
    found = (_check_evaluations(window.subject, steps, indexes[max(0, count - _MOST) : count]) for count in due)
    return next((growth for growth in found if growth is not None), None)


def _is_due(count: int) -> bool:
    due = _FEWEST
    while due < count:
        due += math.ceil(_MORE * due)
    return due == count


def _check_evaluations(group: Group, steps: Rows, indexes: list[int]) -> _Growth | None:
    rows = steps[indexes[0] : indexes[-1] + 1]
    seconds = steps["eval_s"][indexes].astype(np.float64)
    first, last = float(seconds[:2].mean()), float(seconds[-2:].mean())
    half = len(rows) // 2
    usual, now = (float(np.nanmedian(part["iteration_s"])) for part in (rows[:half], rows[half:]))
    total = float(seconds.sum() + np.nansum(rows["iteration_s"]))
    share = float(seconds.sum()) / total
    has_grown = last - first >= _GROWN_S and last >= _TIMES_AS_LONG * first * max(1.0, now / usual)
    if not has_grown or share < _LEAST_SHARE or _measure_rising(seconds) < _PAIRS_SHARE:
        return None
    known_ns = int(rows["end_unix_ns"][-1])
    begin_ns = int(steps["begin_unix_ns"][indexes[-_FEWEST // 2]] - 1e9 * seconds[-_FEWEST // 2])
    evidence = {"added_s": (last - first) / (len(seconds) - 2), "first_s": float(seconds[0]), "last_s": float(seconds[-1])}
    evidence |= {"evaluations": float(len(seconds)), "share": share, "iteration_s": now}
    lost_share = float((seconds - seconds[0]).sum()) / total
    return _Growth(Delay(group.lead, "eval", begin_ns, known_ns, known_ns), rows, evidence, lost_share)


def _measure_rising(seconds: Floats) -> float:
    """Return the share of pairs in which the later value is higher."""
    rising = np.triu(seconds[None, :] > seconds[:, None], 1).sum()
    return float(rising / (len(seconds) * (len(seconds) - 1) / 2))
