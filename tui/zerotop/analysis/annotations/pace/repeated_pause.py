"""Now and then an iteration pauses, each time in the same line of the job's own code: a cleanup, a log, a file."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Floats, Group, Rows
from zerotop.analysis.annotations.support.host_load import measure_load
from zerotop.analysis.annotations.support.lines.line_findings import Delay, is_cause, line_values, measure_between, name_line
from zerotop.analysis.annotations.support.lines.stack_lines import BETWEEN, SLOW, UNSEEN, StackLine, find_line
from zerotop.session.reader import Event
from zerotop_probe.recording import events

_KIND = FindingKind(
    name="repeated_pause",
    severity=Severity.WARNING,
    confidence=0.9,
    headline="Every {period:.0f} iterations a pause takes {pause_s:seconds} ({share:percent})",
    details="{pauses:count pause} since step {step}, most of it at {line}; other iterations take {iteration_s:seconds}.",
)
# Pauses that show a line, and what they take of the time since the first.
_FEWEST_PAUSES = 3
PAUSE_SHARE = 0.05
# A pause is so much longer than what the place usually takes: seconds, as a share of an iteration, and of that usual time.
_LONGER_SECONDS, _LONGER_SHARE, _LONGER_TIMES = 0.02, 0.25, 3.0
# After so many more pauses at a line they are measured again, as a share: the work stays in proportion to the recording.
_MORE_PAUSES = 1 / 8
# Steps since the first pause, if some are counted: before that it may be a change for good.
_FEWEST_COUNTED = 20
# Steps that show how long phases usually are.
_USUAL_STEPS = 50
# If more of the iterations are so long, they have become slower.
_MOST_ITERATIONS = 0.4


class _State:
    def __init__(self) -> None:
        self.events_read = 0
        self.lines: dict[tuple[str, int], _Pauses] = {}


class _Pauses:
    """Pauses at a line that is not reported yet."""

    def __init__(self, begin_ns: int) -> None:
        self.begin_ns = begin_ns  # of the first one
        self.count = 0
        self.due_count = _FEWEST_PAUSES  # with which they are measured


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report each line once for each attempt."""
    for group in recording.groups:
        state = group.get_state(_State, _KIND.name)
        found = group.lead.events_named(events.STACKS)
        fresh, state.events_read = found[state.events_read :], len(found)
        for event in fresh:
            if event.facts["where"] in (BETWEEN, UNSEEN) and event.facts["why"] == SLOW:
                yield from _check_event(group, state, event)


def _check_event(group: Group, state: _State, event: Event) -> Iterator[Annotation]:
    lead, known_ns, where = group.lead, event.unix_ns, event.facts["where"]
    begin_ns, end_ns = (int(event.facts[name]) + lead.source.offset_ns for name in ("begin_ns", "end_ns"))
    line = find_line(lead, where, begin_ns, end_ns, known_ns, why=SLOW)
    if line is None or not is_cause(line, Delay(lead, BETWEEN, begin_ns, end_ns, known_ns)):
        return
    key = line.file, line.line
    pauses = state.lines.setdefault(key, _Pauses(begin_ns))
    pauses.count += 1
    if pauses.count < pauses.due_count or (_KIND.name, key) in group.reported:
        return
    pauses.due_count = pauses.count + math.ceil(_MORE_PAUSES * pauses.count)
    rows = lead.steps_until(known_ns)
    rows = rows[np.searchsorted(rows["end_unix_ns"], pauses.begin_ns, "right") :]
    finding = _measure_pauses(group, rows, line, known_ns)
    if finding is not None:
        group.reported.add((_KIND.name, key))
        yield finding


def _measure_pauses(group: Group, rows: Rows, line: StackLine, known_ns: int) -> Annotation | None:
    between = _estimate_between(group, rows, known_ns)
    if len(rows) < (_FEWEST_COUNTED if rows["counted"].any() else _FEWEST_PAUSES) or between is None:
        return None
    iteration = float(np.median(rows["iteration_s"]))
    usual = float(np.median(between))
    longer = between - usual
    is_pause = longer >= max(_LONGER_SECONDS, _LONGER_SHARE * iteration, _LONGER_TIMES * usual)
    pauses = int(is_pause.sum())
    if not _FEWEST_PAUSES <= pauses <= _MOST_ITERATIONS * len(rows):
        return None
    share = float(longer[is_pause].sum() / rows["iteration_s"].sum())
    if share < PAUSE_SHARE or _may_be_load(group, rows, line):
        return None
    period = (np.flatnonzero(is_pause)[-1] - np.flatnonzero(is_pause)[0]) / (pauses - 1)
    evidence = {"pause_s": float(np.median(longer[is_pause])), "share": share, "iteration_s": iteration, "period": period}
    kind = name_line(_KIND, line)
    return kind.at_steps(group, rows, evidence | {"pauses": pauses}, known_ns=known_ns, cost=share, **line_values(line))


def _estimate_between(group: Group, rows: Rows, known_ns: int) -> Floats | None:
    """Return the seconds of each step outside its phases; of counted steps the phases are taken to last as usual."""
    between = measure_between(rows)
    counted = np.isnan(between)
    if counted.any():
        phased = group.lead.phased_steps_until(known_ns)[-_USUAL_STEPS:]
        if not len(phased):
            return None
        between[counted] = rows["iteration_s"][counted] - np.median(phased["iteration_s"] - measure_between(phased))
    return between


def _may_be_load(group: Group, rows: Rows, line: StackLine) -> bool:
    """Whether others use the cores: any line may then wait for one, and the unknown phases of counted steps take longer."""
    load = measure_load(group.lead.recording, group.lead.host, int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1]))
    if load is None:
        return False
    return (line.known_call is None and load.is_starved) or (bool(rows["counted"].any()) and load.is_disturbed)
