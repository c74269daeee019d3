"""Training stops while a checkpoint is saved."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.lines.line_findings import line_values
from zerotop.analysis.findings.support.lines.stack_lines import Delay, await_line
from zerotop.analysis.findings.support.links import Kinds, is_counted
from zerotop.analysis.findings.support.thresholds import SPIKE_SIMILAR_SHARE
from zerotop.recording.samples import Ints, Rows

_KIND = FindingKind(
    name="checkpoint_pause",
    severity=Severity.INFO,
    confidence=0.99,
    lost_once="pause_s",
    headline="A checkpoint stopped training for {pause_s:seconds}, as long as {iterations:.0f} iterations",
    details="It was saved after step {step}[ at {line}]; an iteration takes {iteration_s:seconds}.",
    advice="Save less often, or without the optimizer's state if training will not be resumed.",
    fix="{saving_fix}",
    superseded_by=(Kinds(is_counted, "steps_in_turn"),),
)
_OFTEN = _KIND.with_changes(
    severity=Severity.WARNING,
    headline="From step {step} on, checkpoints take {share:percent} of the time[: {place}]",
    details="{saves:count checkpoint} since step {step}, one after {every}, took {pause_s:seconds}[, saved at {line}].",
)
# Checkpoints are too frequent if this many in a row take this share of the time, or fewer far more of it.
OFTEN_SAVES, OFTEN_SHARE = 8, 0.10
FEW_SAVES, FEW_SHARE = 4, 0.30
# The finding is updated each time the number of checkpoints has grown by an eighth.
_MORE_SAVES = 8
# A pause is worth a finding if it is longer than these seconds and these iterations.
PAUSE_SECONDS = 1.0
PAUSE_ITERATIONS = 2.0


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
        values = line_values(found.line) | {"every": f"each {period} steps" if period > 1 else "each step"}
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
