"""Training stops while a checkpoint is saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support.evidence import Evidence, Group, Rows
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.analysis.findings.support.lines.line_findings import await_lines, line_values
from zerotop.analysis.findings.support.lines.stack_lines import Delay
from zerotop.analysis.findings.support.thresholds import SPIKE_SIMILAR_SHARE

_KIND = FindingKind(
    name="checkpoint_pause",
    severity=Severity.INFO,
    confidence=0.99,
    lost_once="pause_s",
    headline="A checkpoint stopped training for {pause_s:seconds}, as long as {iterations:.0f} iterations",
    details="It was saved after step {step}[ at {line}]; an iteration takes {iteration_s:seconds}.",
    advice="Save less often, or without the optimizer's state if training will not be resumed.",
    fix="{saving_fix}",
)
_OFTEN = _KIND.with_changes(
    severity=Severity.WARNING,
    headline="Checkpoints take {share:percent} of the time: one after {every}[: {place}]",
    details="{saves:count checkpoint} since step {step} took {pause_s:seconds}[, saved at {line}].",
)
# Checkpoints are too frequent if this many in a row take this share of the time.
OFTEN_SAVES, OFTEN_SHARE = 8, 0.10
# A pause is worth a finding if it is longer than these seconds and these iterations.
PAUSE_SECONDS = 1.0
PAUSE_ITERATIONS = 2.0


class _State:
    saves_read = 0
    longest_s = 0.0

    def __init__(self) -> None:
        self.recent: list[_Save] = []  # at most OFTEN_SAVES


class _Save(NamedTuple):
    """A checkpoint, in unix nanoseconds."""

    begin_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """The duration of the checkpoint."""
        return (self.end_ns - self.begin_ns) / 1e9


class _Pause(NamedTuple):
    """The pauses that a finding reports: one long checkpoint, or many of them."""

    delay: Delay
    kind: FindingKind
    evidence: dict[str, float]
    step: int


def detect(recording: Evidence) -> Iterator[Finding]:
    """Report the first long pause of each attempt, later ones longer by SPIKE_SIMILAR_SHARE, and frequent pauses."""
    for group in recording.groups:
        for (delay, kind, evidence, step), found in await_lines(
            group, _KIND.name, _find_pauses(group), lambda pause: pause.delay
        ):
            period = round(evidence.get("period", 1))
            values = line_values(found.line) | {"every": f"each {period} steps" if period > 1 else "each step"}
            yield kind.at(group, delay.begin_ns, delay.end_ns, evidence, known_ns=found.known_ns, step=step, **values)


def _find_pauses(group: Group) -> Iterator[_Pause]:
    lead, state = group.lead, group.get_state(_State)
    saves = lead.read_rare_phases("checkpoint_save").skip(state.saves_read)
    state.saves_read += len(saves)
    for save in map(_Save, lead.compute_begins(saves).tolist(), saves.times.tolist()):
        before = lead.steps_until(save.begin_ns)
        if len(before):
            state.recent = [*state.recent, save][-OFTEN_SAVES:]
            yield from _find_long(group, state, save, before)
            yield from _find_often(group, state.recent, before)


def _find_long(group: Group, state: _State, save: _Save, before: Rows) -> Iterator[_Pause]:
    pause = save.seconds
    if pause < PAUSE_SECONDS or pause <= state.longest_s * (1 + SPIKE_SIMILAR_SHARE):
        return
    usual = float(np.median(before["iteration_s"][-20:]))
    if pause >= PAUSE_ITERATIONS * usual:
        state.longest_s = pause
        evidence = {"pause_s": pause, "iteration_s": usual, "iterations": pause / usual}
        yield _Pause(_make_delay(group, save.begin_ns, save), _KIND, evidence, int(before["step"][-1]))


def _find_often(group: Group, recent: list[_Save], before: Rows) -> Iterator[_Pause]:
    total = sum(save.seconds for save in recent)
    share = total * 1e9 / (recent[-1].end_ns - recent[0].begin_ns)
    if len(recent) < OFTEN_SAVES or share < OFTEN_SHARE or _OFTEN in group.reported:
        return
    group.reported.add(_OFTEN)
    steps = before["step"][np.searchsorted(before["end_unix_ns"], recent[0].begin_ns) :]
    period = max(1.0, len(steps) / (OFTEN_SAVES - 1))
    evidence = {"pause_s": total, "share": share, "period": period, "saves": len(recent)}
    yield _Pause(_make_delay(group, recent[0].begin_ns, recent[-1]), _OFTEN, evidence, int(before["step"][-1] - len(steps)))


def _make_delay(group: Group, begin_ns: int, last: _Save) -> Delay:
    return Delay(group.lead, "checkpoint_save", begin_ns, last.end_ns, last.end_ns)
