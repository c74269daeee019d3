"""From some step on, exactly every n-th iteration takes longer: a log, a copy to the host, an update of averages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support.evidence import Evidence, Floats, Group, Rows
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.analysis.findings.support.lines.line_findings import (
    PLACES,
    await_lines,
    is_cause,
    line_values,
    measure_between,
    name_line,
    note_named_line,
)
from zerotop.analysis.findings.support.lines.stack_lines import BETWEEN, SLOW, Delay, find_line
from zerotop.recording.steps.step_dtype import has_phases

_KIND = FindingKind(
    name="steps_in_turn",
    severity=Severity.WARNING,
    confidence=0.8,
    headline="From step {step} on, one of {period:.0f} iterations takes {pause_s:seconds} longer",
    details=(
        "All others take {iteration_s:seconds}; on average iterations take {after_s:seconds} instead of {before_s:seconds}"
        "[. Most of the time that they take longer is spent at {line}]."
    ),
    advice="See what is done in every n-th step only, and do it less often or beside the training.",
)
# Turns that show it; the longest period; how many steps are searched, and after which part of more ones again.
_FEWEST, _LONGEST, _MOST_STEPS, _MORE = 12, 32, 2048, 8
# How much longer these iterations are: seconds, share of the others, share of the time that is really lost.
_LEAST_S, _LEAST_SHARE, _LOST_SHARE = 0.01, 0.5, 0.08
# Iterations with phases of each kind that show where the long ones take longer.
_FEWEST_PHASED = 3
# Shares of the turns that are long since the first one, and before.
_MOST_TURNS, _FEW_TURNS = 0.9, 0.1


class _State:
    due = 2 * _LONGEST


class _Turns(NamedTuple):
    rows: Rows
    evidence: dict[str, float]
    delay: Delay


def detect(recording: Evidence) -> Iterator[Finding]:
    """Report once for each attempt, after as many turns as show it."""
    for group in recording.groups:
        for turns, found in await_lines(group, _KIND.name, _find_turns(group), lambda turns: turns.delay):
            lost = 1 - turns.evidence["before_s"] / turns.evidence["after_s"]
            line = find_line(turns.delay, why=SLOW, known_ns=found.known_ns) or found.line
            if line is not None and not is_cause(line, turns.delay):
                line = None
            kind = name_line(_KIND, line) if line is not None else _KIND
            if line is not None:
                note_named_line(group, line, found.known_ns)
            values = line_values(line)
            yield kind.at_steps(group, turns.rows, turns.evidence, known_ns=found.known_ns, cost=lost, **values)


def _find_turns(group: Group) -> Iterator[_Turns]:
    state, steps = group.get_state(_State, _KIND.name), group.lead.steps
    while len(steps) >= state.due and _KIND.name not in group.reported:
        known = steps[: state.due][-_MOST_STEPS:]
        state.due += max(_FEWEST, state.due // _MORE)
        begin, evidence = _measure(np.asarray(known["iteration_s"], np.float64))
        if evidence is not None:
            group.reported.add(_KIND.name)
            rows = known[begin:]
            begin_ns, known_ns = int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])
            place = _find_place(rows, evidence)
            yield _Turns(rows, evidence, Delay(group.lead, place, begin_ns, known_ns, known_ns))


def _find_place(rows: Rows, evidence: dict[str, float]) -> str:
    """Return the place of stacks where the long iterations take longer; between the phases if that is unknown."""
    is_long = rows["iteration_s"] >= evidence["iteration_s"] + evidence["pause_s"] / 2
    long, others = (some[has_phases(some)] for some in (rows[is_long], rows[~is_long]))
    if min(len(long), len(others)) < _FEWEST_PHASED:
        return BETWEEN
    medians = [{name: float(np.median(_read(some, name))) for name in PLACES} for some in (long, others)]
    return PLACES[max(PLACES, key=lambda name: medians[0][name] - medians[1][name])]


def _read(rows: Rows, name: str) -> Floats:
    return measure_between(rows) if name == "other_s" else np.asarray(rows[name], np.float64)


def _measure(seconds: Floats) -> tuple[int, dict[str, float] | None]:
    """Return the index of the first long iteration, and the numbers; None if they do not take turns since then only."""
    for period in range(2, _LONGEST + 1):
        latest = seconds[-_FEWEST * period :]
        if len(latest) < _FEWEST * period or np.isnan(latest).any():
            return 0, None
        table = latest.reshape(_FEWEST, period)
        place = int(np.argmax(np.median(table, axis=0)))
        turns, others = table[:, place], np.delete(table, place, axis=1)
        usual = float(np.median(others))
        longer = float(np.median(turns)) - usual
        if longer < max(_LEAST_S, _LEAST_SHARE * usual) or np.sort(turns)[1] <= np.percentile(others, 95):
            continue
        first = (len(seconds) - len(latest) + place) % period
        begin = _find_begin(seconds[first::period] >= usual + longer / 2)
        if begin is not None:
            index = first + begin * period
            before, after = float(np.nanmedian(seconds[:index])), float(np.nanmean(seconds[index:]))
            clipped = np.minimum(seconds[:index], 5 * before)
            before_s = float(np.nanmean(clipped))
            if after - before_s >= max(longer / period / 2, _LOST_SHARE * after):
                numbers = {"period": period, "pause_s": longer, "iteration_s": usual, "before_s": before_s, "after_s": after}
                return index, {name: float(value) for name, value in numbers.items()}
    return 0, None


def _find_begin(is_long: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int | None:
    """Return the turn from which on almost all are long, if hardly any was before."""
    begin = next((at for at in np.flatnonzero(is_long).tolist() if is_long[at:].mean() >= _MOST_TURNS), None)
    if begin is None or begin < _FEWEST or is_long[:begin].mean() > _FEW_TURNS:
        return None
    return int(begin)
