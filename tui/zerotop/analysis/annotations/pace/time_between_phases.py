"""From the first steps on, a notable share of each iteration is spent in a line of the job's code between the phases."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Process
from zerotop.analysis.annotations.support.gpu_use import measure_gpu_use
from zerotop.analysis.annotations.support.lines.line_findings import (
    is_cause,
    is_named,
    line_values,
    measure_between,
    name_line,
    note_named_line,
)
from zerotop.analysis.annotations.support.lines.stack_lines import (
    BETWEEN,
    SHARE,
    UNSEEN,
    Delay,
    find_line,
    is_training,
    read_new_stacks,
    select_stacks,
)
from zerotop.analysis.annotations.support.thresholds import BETWEEN_SECONDS
from zerotop.session.reader import Source
from zerotop_probe.recording.events import Stacks

_KIND = FindingKind(
    name="time_between_phases",
    severity=Severity.WARNING,
    confidence=0.9,
    headline="{share:percent} of each {iteration_s:seconds} iteration is spent outside {tool}",
    details=(
        "{between_s:seconds} of it between the phases (data, forward, backward, step), most of that at {line}, since the"
        " first steps."
    ),
)
# The share of each iteration that is worth a finding.
BETWEEN_SHARE = 0.15
# The first steps, without the very first one.
_FIRST = slice(1, 21)
# Samples that show a line.
_FEWEST_SAMPLES = 10
# A GPU that is busy in more of the time does not wait for the host.
_BUSY_SHARE = 0.9


# The samples are examined again after this share of more ones, so that the work grows linearly with the recording.
_MORE_SAMPLES = 1 / 8


class _State:
    samples = 0
    due_samples = _FEWEST_SAMPLES

    def __init__(self) -> None:
        self.events_read: dict[Source, int] = {}


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report once for each attempt if all ranks spend time there. If only one rank does, it is a straggler."""
    for group in recording.groups:
        lead, state = group.lead, group.get_state(_State, _KIND.name)
        for event in read_new_stacks(lead, state.events_read, (BETWEEN, UNSEEN), SHARE):
            if _KIND.name not in group.reported and not group.has_stages:
                state.samples += _count_samples(event)
                if state.samples >= state.due_samples:
                    state.due_samples = state.samples + math.ceil(_MORE_SAMPLES * state.samples)
                    yield from _check_event(group, event)


def _count_samples(event: Stacks) -> int:
    """Return the number of samples between the phases."""
    if event.where == BETWEEN:
        return event.samples or 0
    return sum(stack.count or 0 for stack, _ in select_stacks(event, BETWEEN))


def _check_event(group: Group, event: Stacks) -> Iterator[Annotation]:
    lead, known_ns = group.lead, event.unix_ns
    rows = lead.phased_steps_until(known_ns)
    if len(rows) < 2 or not all(_spends_time(one, known_ns) for one in group.processes):
        return
    begin_ns = int(rows["begin_unix_ns"][0])
    delay = Delay(lead, BETWEEN, begin_ns, known_ns, known_ns)
    line = find_line(delay, why=SHARE)
    if line is None or is_training(line.callees) or not is_cause(line, delay):
        return
    if measure_gpu_use(lead, int(rows["begin_unix_ns"][1]), known_ns) >= _BUSY_SHARE or is_named(group, line, known_ns):
        return
    group.reported.add(_KIND.name)
    between, iteration = float(np.median(measure_between(rows[1:]))), float(np.median(rows["iteration_s"][1:]))
    evidence = {"between_s": between, "iteration_s": iteration, "share": between / iteration}
    kind, share = name_line(_KIND, line), between / iteration
    note_named_line(group, line, known_ns)
    yield kind.at_steps(group, rows[1:], evidence, known_ns=known_ns, cost=share, **line_values(line))


def _spends_time(process: Process, known_ns: int) -> bool:
    rows = process.phased_steps_until(known_ns)
    return all(
        len(part) > 0
        and float(np.median(measure_between(part))) >= BETWEEN_SECONDS
        and float(np.median(measure_between(part) / part["iteration_s"])) >= BETWEEN_SHARE
        for part in (rows[_FIRST], rows[1:])
    )
