"""Training stops while a checkpoint is saved."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from zerotop.analysis.code_line import CodeLine, read_line
from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.lines.line_findings import line_values
from zerotop.analysis.findings.support.lines.stack_lines import Delay, StackLine, await_line
from zerotop.analysis.findings.support.links import Kinds, is_counted
from zerotop.analysis.findings.support.steps.lost_time import count_rarer_steps
from zerotop.analysis.findings.support.thresholds import SPIKE_SIMILAR_SHARE
from zerotop.analysis.script_terms import set_interval
from zerotop.recording.samples import Ints, Rows
from zerotop_probe.recording.events import CheckpointLine

_KIND = FindingKind(
    name="checkpoint_pause",
    severity=Severity.INFO,
    confidence=0.99,
    lost_once="pause_s",
    headline="A checkpoint stopped training for {pause_s:seconds}, as long as {iterations:.0f} iterations",
    details="It was saved after step {step}[ at {line}]; an iteration takes {iteration_s:seconds}.",
    superseded_by=(Kinds(is_counted, "steps_in_turn"),),
)
_OFTEN = _KIND.with_changes(
    severity=Severity.WARNING,
    headline="From step {step} on, checkpoints take {share:percent} of the time[: {place}]",
    details="{saves:count checkpoint} since step {step}, one after {every}, took {pause_s:seconds}[, saved at {line}].",
    advice=(
        "Save every {rarer:,.0f} steps: that takes at most {rare:percent} of the time. Or save without the optimizer's"
        " state, if training will not be resumed."
    ),
    fix="[{saving}]",
)
# The share of the time that checkpoints may take.
_RARE_SHARE = 0.02
# Checkpoints are too frequent if this many in a row take this share of the time, or fewer far more of it.
OFTEN_SAVES, OFTEN_SHARE = 8, 0.10
FEW_SAVES, FEW_SHARE = 4, 0.30
# The finding is updated each time the number of checkpoints has grown by an eighth.
_MORE_SAVES = 8
# A pause is worth a finding if it is longer than these seconds and these iterations.
PAUSE_SECONDS = 1.0
PAUSE_ITERATIONS = 2.0
# Of frequent saves from several lines, one is named whose saves took this share of their time.
_LINE_SHARE = 0.5


class _Pause(NamedTuple):
    """The pauses that a finding reports: one long checkpoint, or many of them."""

    delay: Delay
    kind: FindingKind
    evidence: dict[str, float]
    step: int


class _Often(NamedTuple):
    """Frequent checkpoints: indices of the first one, and of the last one that was counted."""

    first: int
    last: int
    pause: _Pause


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report the first long pause of each attempt, later ones longer by SPIKE_SIMILAR_SHARE, and frequent pauses."""
    for (delay, kind, evidence, step), found in window.await_each(_find_pauses(window), lambda one: await_line(one.delay)):
        period = round(evidence.get("period", 1))
        line = found.line or _find_saving_line(delay, is_one=kind is _KIND)
        values = line_values(line) | {"every": f"each {period} steps" if period > 1 else "each step"}
        values |= {
            "rare": _RARE_SHARE,
            "rarer": (rarer := count_rarer_steps(period, evidence.get("share", 0.0), _RARE_SHARE)),
        }
        values["saving"] = set_interval(window.subject.engine, "save", rarer) or values["location"]
        times = delay.begin_ns, delay.end_ns
        yield kind.at(window.subject, *times, evidence, known_ns=found.known_ns, step=step, **values)


def _find_pauses(window: SearchWindow[Group]) -> Iterator[_Pause]:
    lead = window.subject.lead
    saves = lead.read_rare_phases("checkpoint_save")
    begins, ends = lead.compute_begins(saves), saves.times
    new = window.steps(saves.rows)
    for index in range(len(saves))[new]:
        before = lead.steps_until(int(begins[index]))
        if not len(before):
            continue
        pause, usual = float(ends[index] - begins[index]) / 1e9, float(np.median(before["iteration_s"][-20:]))
        if pause >= max(PAUSE_SECONDS, PAUSE_ITERATIONS * usual) and window.is_news(pause, _is_longer):
            evidence = {"pause_s": pause, "iteration_s": usual, "iterations": pause / usual}
            delay = _make_delay(lead, begins[index], ends[index])
            yield _Pause(delay, _KIND, evidence, int(before["step"][-1]))
    yield from (often.pause for often in window.extend(partial(_find_often, lead, begins, ends, new.start), 0))


def _find_often(lead: Process, begins: Ints, ends: Ints, new: int, last: _Often | None) -> _Often | None:
    """Return the first frequent checkpoints, of which the last is a new one, or those with an eighth more of them."""
    due = last.last + max(1, (last.last + 1 - last.first) // _MORE_SAVES) if last is not None else 0
    for index in range(max(new, due), len(begins)):
        before = lead.steps_until(int(begins[index]))
        if not len(before):
            continue
        earliest = int(np.searchsorted(begins, before["end_unix_ns"][0]))
        first = max(index + 1 - OFTEN_SAVES, earliest) if last is None else last.first
        if index + 1 - first >= FEW_SAVES:
            pause = _measure_often(lead, begins[first : index + 1], ends[first : index + 1], before)
            if pause is not None:
                return _Often(first, index, pause)
    return None


def _is_longer(last: float, pause: float) -> bool:
    return pause > last * (1 + SPIKE_SIMILAR_SHARE)


def _measure_often(lead: Process, begins: Ints, ends: Ints, before: Rows) -> _Pause | None:
    total = float((ends - begins).sum()) / 1e9
    share = total * 1e9 / float(ends[-1] - begins[0])
    if share < (OFTEN_SHARE if len(begins) >= OFTEN_SAVES else FEW_SHARE):
        return None
    steps = before["step"][np.searchsorted(before["end_unix_ns"], begins[0], "right") :]
    period = max(1.0, len(steps) / (len(begins) - 1))
    evidence = {"pause_s": total, "share": share, "period": period, "saves": len(begins)}
    return _Pause(_make_delay(lead, begins[0], ends[-1]), _OFTEN, evidence, int(before["step"][-1] - len(steps)))


def _make_delay(lead: Process, begin_ns: int, end_ns: int) -> Delay:
    return Delay(lead, "checkpoint_save", int(begin_ns), int(end_ns), int(end_ns))


def _find_saving_line(delay: Delay, *, is_one: bool) -> StackLine | None:
    """Return the line whose saves took most of the time; stacks of short saves are seldom sampled.

    Some of the saves of each line are known, with their number until then; None is the line of those without an own one.
    ``is_one``: of a single save that is not among them, only the line of all saves is known.
    """
    process, total_s = delay.process, (delay.end_ns - delay.begin_ns) / 1e9
    saves = process.read_rare_phases("checkpoint_save")
    begins, ends = process.compute_begins(saves), saves.times
    counts: dict[CodeLine | None, int] = {}
    known_s: dict[CodeLine | None, list[float]] = {}
    for event in process.events_of(CheckpointLine):
        index, line = int(np.searchsorted(ends, event.unix_ns, "right")), read_line(event)
        if index == len(ends) or begins[index] > event.unix_ns or ends[index] > delay.known_ns:
            continue
        if is_one and delay.begin_ns <= event.unix_ns < delay.end_ns:
            return _make_line(line, total_s, 1.0) if line is not None else None
        counts[line] = event.saves or 1
        known_s.setdefault(line, []).append(float(ends[index] - begins[index]) / 1e9)
    shares = {line: counts[line] * sum(each) / len(each) for line, each in known_s.items()}
    if not shares or (is_one and len(shares) > 1):
        return None
    most = max(shares, key=lambda line: shares[line])
    share = shares[most] / sum(shares.values())
    return _make_line(most, total_s * share, share) if most is not None and share >= _LINE_SHARE else None


def _make_line(line: CodeLine, seconds: float, share: float) -> StackLine:
    return StackLine(line.file, line.line, line.function, (), seconds, share)
