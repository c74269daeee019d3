"""Training stops while a checkpoint is saved."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group
from zerotop.analysis.annotations.support.lines.line_findings import Delay, await_lines, line_values
from zerotop.analysis.annotations.support.thresholds import SPIKE_SIMILAR_SHARE

_KIND = FindingKind(
    name="checkpoint_pause",
    severity=Severity.INFO,
    confidence=0.99,
    headline="A checkpoint stopped training for {pause_s:seconds}, as long as {iterations:.0f} iterations",
    details="It was saved after step {step}[ at {line}]; an iteration takes {iteration_s:seconds}.",
    advice="Save less often, or without the optimizer's state if training will not be resumed.",
    fix="{saving_fix}",
)
# A pause longer than so many seconds and than so many iterations is worth a finding.
PAUSE_SECONDS = 1.0
PAUSE_ITERATIONS = 2.0


class _State:
    saves_read = 0
    longest_s = 0.0


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report the first long pause of each attempt, and later ones that are longer by SPIKE_SIMILAR_SHARE."""
    for group in recording.groups:
        for (delay, step, usual), found in await_lines(group, _KIND.name, _find_pauses(group), _find_delay):
            pause = (delay.end_ns - delay.begin_ns) / 1e9
            evidence = {"pause_s": pause, "iteration_s": usual, "iterations": pause / usual}
            values = line_values(found.line)
            yield _KIND.at(group, delay.begin_ns, delay.end_ns, evidence, known_ns=found.known_ns, step=step, **values)


_Pause = tuple[Delay, int, float]  # the step before it, and the seconds of an iteration


def _find_pauses(group: Group) -> Iterator[_Pause]:
    lead, state = group.lead, group.get_state(_State)
    saves = lead.read_rare_phases("checkpoint_save").skip(state.saves_read)
    state.saves_read += len(saves)
    for begin_ns, end_ns in zip(lead.compute_begins(saves).tolist(), saves.times.tolist(), strict=True):
        before = lead.steps_until(begin_ns)
        pause = (end_ns - begin_ns) / 1e9
        if not len(before) or pause < PAUSE_SECONDS or pause <= state.longest_s * (1 + SPIKE_SIMILAR_SHARE):
            continue
        usual = float(np.median(before["iteration_s"][-20:]))
        if pause >= PAUSE_ITERATIONS * usual:
            state.longest_s = pause
            yield Delay(lead, "checkpoint_save", begin_ns, end_ns, end_ns), int(before["step"][-1]), usual


def _find_delay(pause: _Pause) -> Delay:
    return pause[0]
