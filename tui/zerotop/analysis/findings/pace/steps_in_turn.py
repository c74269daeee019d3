"""From some step on, exactly every n-th iteration takes longer: a log, a copy to the host, an update of averages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support import (
    Finding,
    FindingKind,
    Group,
    Process,
    SearchWindow,
    Severity,
    in_each_attempt,
)
from zerotop.analysis.findings.support.lines import line_findings
from zerotop.analysis.findings.support.lines.stack_lines import BETWEEN, SLOW, Delay, FoundLine, await_line, find_line
from zerotop.analysis.findings.support.links import (
    TO_DEAD_THREADS,
    Kinds,
    begins_together,
    counts_less,
    grows_in_turn,
    is_simultaneous,
)
from zerotop.analysis.findings.support.steps.lost_time import has_cost_little
from zerotop.recording.samples import Floats, Rows
from zerotop.recording.steps.step_dtype import has_phases
from zerotop.recording.steps.step_memory import measure_held_bytes

_KIND = FindingKind(
    name="steps_in_turn",
    confidence=0.8,
    headline="From step {step} on, one of {period:.0f} iterations takes {pause_s:seconds} longer",
    details=(
        "All others {take} {iteration_s:seconds}; on average iterations {take} {after_s:seconds} instead of"
        " {before_s:seconds}"
        "[; a checkpoint {takes} {checkpoint_s:seconds} in that one][; an evaluation {takes} {evaluation_s:seconds} in that"
        " one][; the process's memory {grows} by {grown_bytes:bytes} in that one]"
        "[, and {most} of {rest} {is_} spent at {line}]."
    ),
    advice="See what is done in every n-th step only, and do it less often or beside the training.",
    explained_by=(*TO_DEAD_THREADS, Kinds(grows_in_turn, "host_growth")),
    superseded_by=(
        Kinds(is_simultaneous, "repeated_pause", "data_stall"),
        Kinds(counts_less, "checkpoint_pause"),
        Kinds(begins_together, "iteration_shift", "evaluations_often"),
    ),
)
# Turns that show it, fewer where each takes so many times as long as the others, and longer than each of these.
_FEWEST, _FEWEST_FAR, _FAR_TIMES = 12, 5, 3.0
# The longest period; how many steps are searched, and after which part of more ones again.
_LONGEST, _MOST_STEPS, _MORE = 32, 2048, 8
# How much longer these iterations are: seconds, share of the others, share of the time that is really lost.
_LEAST_S, _LEAST_SHARE, _LOST_SHARE = 0.01, 0.5, 0.08
# So many times as long as an iteration is more than the GPU's usual work, for which a line may wait.
_WAITED_TIMES = 2.0
# The share of the growth of host memory that comes in these iterations if it is theirs, and the least bytes in each.
_GROWN_SHARE, _LEAST_GROWN = 0.8, 1 << 20
# Iterations with phases of each kind that show where the long ones take longer.
_FEWEST_PHASED = 3
# Phases that are not a part of an iteration, and their names in the evidence.
_APART = {"checkpoint_s": "checkpoint_s", "eval_s": "evaluation_s"}
# Shares of the turns that are long since the first one, and before.
_MOST_TURNS, _FEW_TURNS = 0.9, 1 / 3
_ENDED_HEADLINE = "In steps {step} to {until_step:.0f}, one of {period:.0f} iterations took {pause_s:seconds} longer"
# The words of its texts while it lasts, and once it has ended.
_LASTS = {"takes": "takes", "take": "take", "grows": "grows", "is_": "is"}
_ENDED = {"takes": "took", "take": "took", "grows": "grew", "is_": "was"}


class _Turns(NamedTuple):
    rows: Rows  # from the first long iteration on
    iterations: dict[str, float]  # the evidence of iterations alone
    evidence: dict[str, float]
    delay: Delay


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report once for each attempt, after as many turns as show it, and again with its end."""
    turns = window.find_once(partial(_find_turns, window))
    fresh = window.items([turns] if turns is not None else [])
    told = window.await_each(fresh, lambda turns: await_line(turns.delay))
    for one, found in window.follow(told, partial(_find_end, window)):
        yield _build_finding(window.subject, one, found)


def _build_finding(group: Group, turns: _Turns, found: FoundLine) -> Finding:
    evidence, kind, words = turns.evidence, _KIND, _LASTS
    share = 1 - evidence["before_s"] / evidence["after_s"]
    own_s = evidence["pause_s"] - sum(evidence.get(name, 0.0) for name in _APART.values())
    line = find_line(turns.delay, why=SLOW, known_ns=found.known_ns) or found.line
    if "until_step" in evidence:
        kind, words = _KIND.with_changes(headline=_ENDED_HEADLINE), _ENDED
    if line is not None and line_findings.is_cause(line, turns.delay):
        kind = line_findings.name_line(kind, line)
    elif own_s < _WAITED_TIMES * evidence["iteration_s"]:
        line = None  # it may wait for the GPU's usual work
    if "until_step" in evidence:
        steps = group.lead.steps_until(found.known_ns)
        if has_cost_little(steps, int(turns.rows["step"][0]), int(evidence["until_step"]), share):
            kind = kind.with_changes(severity=Severity.INFO, advice="", fix="")
    values = line_findings.line_values(line) | words
    values["rest"] = "the rest" if evidence.keys() & _APART.values() else "the time that one takes longer"
    return kind.at_steps(group, turns.rows, evidence, known_ns=found.known_ns, cost=share, **values)


def _find_turns(window: SearchWindow[Group]) -> _Turns | None:
    lead = window.subject.lead
    for due in window.extend(partial(_find_due, len(lead.steps)), 0):
        known = lead.steps[:due][-_MOST_STEPS:]
        begin, iterations = _measure(np.asarray(known["iteration_s"], np.float64))
        if iterations is not None:
            return _build_turns(lead, known, begin, iterations)
    return None


def _build_turns(lead: Process, known: Rows, begin: int, iterations: dict[str, float]) -> _Turns:
    rows = known[begin:]
    begin_ns, known_ns = int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])
    delay = Delay(lead, _find_place(rows, iterations), begin_ns, known_ns, known_ns)
    grown = _measure_grown(lead, rows, int(iterations["period"]))
    return _Turns(rows, iterations, _add_apart(known, begin, iterations) | grown, delay)


def _find_end(window: SearchWindow[Group], told: tuple[_Turns, FoundLine]) -> tuple[_Turns, FoundLine] | None:
    """Return the turns until the last long one, once no iteration of several turns was as long; None before that."""
    (turns, found), lead = told, window.subject.lead
    new = window.steps(lead.steps, (_FEWEST_FAR + 1) * _LONGEST, "end")
    if "until_step" in turns.evidence:
        return None
    first = int(np.searchsorted(lead.steps["begin_unix_ns"], turns.delay.begin_ns))
    start, period = max(first, new.start), int(turns.iterations["period"])
    seconds = lead.steps["iteration_s"][start : new.stop]
    # One that is not known may be long.
    long = np.flatnonzero(~(seconds < turns.iterations["iteration_s"] + turns.iterations["pause_s"] / 2))
    after = np.diff(np.append(long, len(seconds))) > _FEWEST_FAR * period
    if not after.any():
        return None
    last = start + int(long[after][0])
    known = lead.steps[max(0, first - _MOST_STEPS) : last + period]
    begin = min(first, _MOST_STEPS)
    mean_s = float(np.nanmean(known["iteration_s"][begin:]))
    ended = _build_turns(lead, known, begin, turns.iterations | {"after_s": mean_s})
    known_ns = max(found.known_ns, int(lead.steps["end_unix_ns"][last + _FEWEST_FAR * period]))
    evidence = ended.evidence | {"until_step": float(lead.steps["step"][last])}
    return ended._replace(evidence=evidence), found._replace(known_ns=known_ns)


def _find_due(count: int, last: int | None) -> int | None:
    """Return the number of steps with which to search next; None if there are fewer."""
    due = 2 * _LONGEST if last is None else last + max(_FEWEST, last // _MORE)
    return due if due <= count else None


def _find_place(rows: Rows, evidence: dict[str, float]) -> str:
    """Return the place of stacks where the long iterations take longer; between the phases if that is unknown."""
    is_long = rows["iteration_s"] >= evidence["iteration_s"] + evidence["pause_s"] / 2
    long, others = (some[has_phases(some)] for some in (rows[is_long], rows[~is_long]))
    if min(len(long), len(others)) < _FEWEST_PHASED:
        return BETWEEN
    medians = [
        {name: float(np.median(line_findings.read_part(some, name))) for name in line_findings.PLACES}
        for some in (long, others)
    ]
    return line_findings.PLACES[max(line_findings.PLACES, key=lambda name: medians[0][name] - medians[1][name])]


def _add_apart(known: Rows, begin: int, evidence: dict[str, float]) -> dict[str, float]:
    """Return the evidence with what is not a part of iterations, such as checkpoints: in the long ones, and on average."""
    added = dict.fromkeys(("pause_s", "before_s", "after_s"), 0.0)
    for name, evidence_name in _APART.items():
        seconds = np.nan_to_num(known[name])
        turns_s = float(np.median(seconds[begin :: int(evidence["period"])]))
        if turns_s:
            parts = {"pause_s": turns_s, "before_s": seconds[:begin].mean(), "after_s": seconds[begin:].mean()}
            added = {key: value + float(parts[key]) for key, value in added.items()} | {evidence_name: turns_s}
    return evidence | {key: value + evidence.get(key, 0.0) for key, value in added.items()}


def _measure_grown(lead: Process, rows: Rows, period: int) -> dict[str, float]:
    """Return the bytes by which host memory grows in each of the long iterations, if it grows in hardly any other.

    ``rows``: the steps from the first long one on.
    """
    samples, turns = (
        lead.host_samples.read_window(int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])),
        rows[::period],
    )
    if len(samples) < _FEWEST:
        return {}
    grown = np.diff(measure_held_bytes(samples.rows).astype(np.float64))
    apart_ns = sum(np.nan_to_num(turns[name]) for name in _APART) * 1e9
    turn = np.searchsorted(turns["end_unix_ns"], samples.times[:-1], "right")
    begins = np.append(turns["begin_unix_ns"] - apart_ns.astype(np.int64), np.iinfo(np.int64).max)
    is_long = begins[turn] < samples.times[1:]
    total = float(grown.sum())
    is_theirs = is_long.mean() <= 1 / 2 and grown[is_long].sum() >= _GROWN_SHARE * total
    return {"grown_bytes": total / len(turns)} if is_theirs and total >= _LEAST_GROWN * len(turns) else {}


def _measure(seconds: Floats) -> tuple[int, dict[str, float] | None]:
    """Return the index of the first long iteration, and the numbers; None if they do not take turns since then only."""
    for period in range(2, _LONGEST + 1):
        for fewest in (_FEWEST, _FEWEST_FAR):
            begin, numbers = _measure_turns(seconds, period, fewest)
            if numbers is not None:
                return begin, numbers
    return 0, None


def _measure_turns(seconds: Floats, period: int, fewest: int) -> tuple[int, dict[str, float] | None]:
    """Return the same for one period, and this many turns."""
    latest = seconds[-fewest * period :]
    if len(latest) < fewest * period or np.isnan(latest).any():
        return 0, None
    table = latest.reshape(fewest, period)
    place = int(np.argmax(np.median(table, axis=0)))
    turns, others = table[:, place], np.delete(table, place, axis=1)
    usual = float(np.median(others))
    longer = float(np.median(turns)) - usual
    if longer < max(_LEAST_S, _LEAST_SHARE * usual) or np.sort(turns)[1] <= np.percentile(others, 95):
        return 0, None
    if fewest < _FEWEST and not turns.min() >= max(_FAR_TIMES * usual, others.max()):
        return 0, None
    first = (len(seconds) - len(latest) + place) % period
    begin = _find_begin(seconds[first::period] >= usual + longer / 2, fewest)
    if begin is None:
        return 0, None
    index = first + begin * period
    before, after = float(np.nanmedian(seconds[:index])), float(np.nanmean(seconds[index:]))
    before_s = float(np.nanmean(np.minimum(seconds[:index], 5 * before)))
    if after - before_s < max(longer / period / 2, _LOST_SHARE * after):
        return 0, None
    whole = seconds[index : len(seconds) - (len(seconds) - index) % period]
    if np.nanmean(whole) - usual < longer / period / 2:  # the host runs ahead after the long ones: no time is lost in them
        return 0, None
    numbers = {"period": period, "pause_s": longer, "iteration_s": usual, "before_s": before_s, "after_s": after}
    return index, {name: float(value) for name, value in numbers.items()}


def _find_begin(is_long: np.ndarray[tuple[int], np.dtype[np.bool_]], fewest: int) -> int | None:
    """Return the turn from which on almost all are long, if few of at least so many were before, and it goes on."""
    begin = next((at for at in np.flatnonzero(is_long).tolist() if is_long[at:].mean() >= _MOST_TURNS), None)
    if begin is None or begin < fewest or len(is_long) - begin < _FEWEST_FAR or is_long[:begin].mean() > _FEW_TURNS:
        return None
    return int(begin)
