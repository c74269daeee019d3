"""Training pauses every few iterations, at the same line of the job's code or to wait for data: a cleanup, a log."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.findings.support.causes.loader_causes import KEEP_WORKERS, find_loader_cause
from zerotop.analysis.findings.support.causes.pause_causes import find_pause_cause
from zerotop.analysis.findings.support.evidence import Floats, Group, Ints, Process, Rows
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.analysis.findings.support.host_load import count_workers, measure_load
from zerotop.analysis.findings.support.lines.known_calls import COMPILE
from zerotop.analysis.findings.support.lines.line_findings import is_cause, line_values, measure_between, name_line
from zerotop.analysis.findings.support.lines.stack_lines import (
    BETWEEN,
    SLOW,
    UNSEEN,
    Delay,
    StackLine,
    find_entries,
    find_line,
    find_line_below,
    select_events_in,
)
from zerotop.analysis.findings.support.links import TO_DEAD_THREADS, Kinds, begins_with_change, is_same_wait, pauses_as_often
from zerotop.analysis.findings.support.window import SearchWindow, in_each_attempt
from zerotop.recording.steps.step_dtype import sum_training_s
from zerotop_probe.recording.events import Stacks

_KIND = FindingKind(
    name="repeated_pause",
    severity=Severity.WARNING,
    confidence=0.9,
    headline="A {pause_s:seconds} pause every {period:.0f} iterations",
    details=(
        "{pauses:count pause} in steps {step} to {last_step}[ on {concerned:ranks}] take {share:percent} of their time,"
        " {most} of it at {line}; other iterations take {iteration_s:seconds}."
    ),
    explained_by=(
        *TO_DEAD_THREADS,
        Kinds(pauses_as_often, "checkpoint_pause"),
        Kinds(begins_with_change, "iteration_shift"),
    ),
    superseded_by=(Kinds(is_same_wait, "data_stall"),),
)
# The line at which the training thread was seen only waits.
_OTHERS = _KIND.with_changes(
    details=(
        "{pauses:count pause} in steps {step} to {last_step}[ on {concerned:ranks}] take {share:percent} of their time;"
        " other iterations take {iteration_s:seconds}. {cause}."
    ),
)
# In a data loader, no line of the job's own code takes the time.
_LOADING = _KIND.with_changes(
    measured_cause="data_stall",
    headline="Every {period:.0f} iterations the wait for data takes {pause_s:seconds}",
    details=(
        "{pauses:count pause} in steps {step} to {last_step} take {share:percent} of their time; other iterations take"
        " {iteration_s:seconds}."
    ),
    advice="See what those iterations read that the others do not. Workers that load ahead hide it.",
)
_STARTING = _LOADING.with_changes(advice=KEEP_WORKERS[0], fix=KEEP_WORKERS[1])
_LOADER = "", 0  # in place of a line
# Pauses that show a line, and their share of the time since the first one.
_FEWEST_PAUSES = 3
PAUSE_SHARE = 0.05
# How much longer a pause is than the usual time of its place: in seconds, as a share of an iteration, as a factor.
_LONGER_SECONDS, _LONGER_SHARE, _LONGER_TIMES = 0.02, 0.25, 3.0
# The pauses at a line are measured again after this share of more ones, so that the work grows linearly.
_MORE_PAUSES = 1 / 8
# Steps since the first pause, if some are counted: before that it may be a change for good.
_FEWEST_COUNTED = 20
# Steps that show how long phases usually are.
_USUAL_STEPS = 50
# This many pauses in exactly every n-th iteration are no coincidence, whatever else runs on the machine.
_REGULAR_PAUSES = 4
# The share of a pause by which iterations at its place had been longer before, to count as the loop's own.
_NOTABLE_SHARE = 0.05
# The share of the slow steps' stacks that show the line, if what other steps did is not known.
_NAMED_SHARE = 0.5
# Pauses at one line are alike: each has at least this share of the longest one.
_REGULAR_ALIKE, _ALIKE = 1 / 2, 1 / 8
# If a larger share of the iterations is this long, they are slower and do not pause.
_MOST_ITERATIONS = 0.4
# Steps after a pause that may make up for it, and the share of it that they then save.
_CATCHING_UP, _MADE_UP_SHARE = 10, 0.5
# Iterations from one pause to the next, on average: others are slower for a while.
_LEAST_APART = 1.5


# The column of each place; empty for the gaps between phases.
_COLUMNS = {BETWEEN: "", UNSEEN: "", "data": "data_s", "forward": "forward_s"}


class _Pauses(NamedTuple):
    """Pauses at a line, or at lines between which their time is divided."""

    begin_ns: int  # of the first one
    times: int
    lines: frozenset[tuple[str, int]]


class _Counted(NamedTuple):
    """An event that shows a pause, and all pauses up to it: those at its lines first."""

    delay: Delay
    line: StackLine | None
    is_divided: bool  # between several lines
    pauses: tuple[_Pauses, ...]


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report each line of each rank, and again with more pauses."""
    for process in window.subject.processes:
        fresh = iter(select_events_in(window.items(process.events_of(Stacks), process), _COLUMNS, SLOW))
        for counted in window.extend(partial(_count_next, process, fresh), 0, process):
            begin_ns, times, _ = counted.pauses[0]
            if window.has_grown(times, _FEWEST_PAUSES, _MORE_PAUSES, (process, begin_ns)):
                yield _check_pauses(window.subject, counted)


def _count_next(process: Process, events: Iterator[Stacks], last: _Counted | None) -> _Counted | None:
    """Return the pauses with that of the next event. Those at lines that had none in common until now become one."""
    for event in events:
        begin_ns, end_ns = (time_ns + process.source.offset_ns for time_ns in (event.begin_ns, event.end_ns))
        delay, entries = Delay(process, event.where, begin_ns, end_ns, event.unix_ns), find_entries(process, event)
        line = find_line(delay, why=SLOW) or find_line_below(delay, entries, why=SLOW)
        if _is_shown(delay, line):
            lines = frozenset(entries or {(line.file, line.line) if line is not None else _LOADER})
            known = last.pauses if last is not None else ()
            same = [one for one in known if not lines.isdisjoint(one.lines)]
            first_ns, times = min([one.begin_ns for one in same], default=begin_ns), sum(one.times for one in same) + 1
            pauses = _Pauses(first_ns, times, lines.union(*(one.lines for one in same)))
            return _Counted(delay, line, bool(entries), (pauses, *(one for one in known if one not in same)))
    return None


def _is_shown(delay: Delay, line: StackLine | None) -> bool:
    """Whether an event's stacks show a pause that is not another detector's."""
    if line is None:
        return delay.where == "data"
    computes = delay.where == "forward" and line.known_call is not COMPILE
    return not computes and is_cause(line, delay._replace(where=BETWEEN))


def _check_pauses(group: Group, counted: _Counted) -> Finding | None:
    (process, where, _, _, known_ns, *_), line, pauses = counted.delay, counted.line, counted.pauses[0]
    if counted.is_divided:
        line = find_line_below(counted.delay._replace(begin_ns=pauses.begin_ns), pauses.lines, why=SLOW) or line
    rows = process.steps_until(known_ns)
    rows = rows[np.searchsorted(rows["end_unix_ns"], pauses.begin_ns, "right") :]
    slow = [one for one in process.events_of(Stacks) if one.why == SLOW and pauses.begin_ns < one.unix_ns <= known_ns]
    is_usual = pauses.times >= _NAMED_SHARE * len(slow)
    concerned = (process.rank,) if len(group.processes) > 1 else None
    return _measure_pauses(process, rows, line, known_ns, _COLUMNS[where], is_usual=is_usual, concerned=concerned)


def _measure_pauses(
    process: Process,
    rows: Rows,
    line: StackLine | None,
    known_ns: int,
    column: str,
    *,
    is_usual: bool,
    concerned: tuple[int, ...] | None,
) -> Finding | None:
    """Return a finding about the pauses in ``rows``; None if they are too few or too short.

    ``column``: the seconds of the phase with the pauses, or "" for the gaps between phases. Without a line, or in counted
    steps where most stacks show another place than this one (``is_usual``), they must be regular.
    """
    between = _estimate_seconds(process, rows, known_ns, column)
    if len(rows) < (_FEWEST_COUNTED if rows["counted"].any() else _FEWEST_PAUSES) or between is None:
        return None
    iteration = float(np.median(rows["iteration_s"]))
    usual = float(np.median(between))
    longer = between - usual
    is_pause = longer >= max(_LONGER_SECONDS, _LONGER_SHARE * iteration, _LONGER_TIMES * usual)
    regular = np.flatnonzero(longer >= longer.max() * _REGULAR_ALIKE)
    is_regular = len(regular) >= _REGULAR_PAUSES and len(set(np.diff(regular))) == 1
    # What else takes longer is chance, or another pause.
    is_pause &= longer >= longer.max() * (_REGULAR_ALIKE if is_regular else _ALIKE)
    pauses = int(is_pause.sum())
    if not _FEWEST_PAUSES <= pauses <= _MOST_ITERATIONS * len(rows) or _is_made_up(process, rows, is_pause):
        return None
    as_before = _measure_before(process, rows, regular) if is_regular else 0.0
    as_before = as_before if as_before >= _NOTABLE_SHARE * float(np.median(longer[is_pause])) else 0.0
    longer = np.maximum(longer - as_before, 0.0)
    share = float(longer[is_pause].sum() / sum_training_s(rows))
    is_elsewhere = bool(rows["counted"].any()) and not is_usual
    if share < PAUSE_SHARE or (not is_regular and (line is None or is_elsewhere or _may_be_load(process, rows, line))):
        return None
    apart = np.diff(np.flatnonzero(is_pause))
    period = float(np.median(apart))
    if period < 2:  # half of them follow each other
        period = float(apart.mean())
        if period < _LEAST_APART:
            return None
    evidence = {"pause_s": float(np.median(longer[is_pause])), "share": share, "iteration_s": iteration, "period": period}
    evidence |= {"pauses": pauses, "longer_before_s": as_before}
    values = {"last_step": int(rows["step"][-1]), **line_values(line)}
    kind = name_line(_KIND, line) if line is not None else _choose_loading(process, rows)
    may_wait = line is None or line.known_call is None
    lost_s = float(longer[is_pause].sum())
    cause = find_pause_cause(process, rows, evidence["pause_s"], lost_s, known_ns) if may_wait else None
    if cause is not None:
        kind = _OTHERS.with_changes(headline=_OTHERS.headline + (": {place}" if cause.place else ""))
        kind = kind.with_changes(advice="{advised}", fix="{fixed}")
        text = cause.text[0].upper() + cause.text[1:]
        values |= {"place": cause.place, "cause": text, "advised": cause.advice[0], "fixed": cause.advice[1]}
    elif line is not None and line.known_call is None and _is_as_ever(process, rows, period, evidence["pause_s"]):
        kind = kind.with_changes(severity=Severity.INFO, advice="", fix="")
    return kind.at_steps(process, rows, evidence, known_ns=known_ns, cost=share, concerned=concerned, **values)


def _is_made_up(process: Process, rows: Rows, is_pause: NDArray[np.bool_]) -> bool:
    """Whether the steps after each pause are shorter by about as much: the host waits for work that it queued before.

    It does where each step replays a CUDA graph, until a loss is read.
    """
    seconds = rows["iteration_s"].astype(np.float64)
    usual = float(np.nanmedian(seconds))
    begins = np.flatnonzero(is_pause).tolist()
    stretches = [(begin, min(end, begin + _CATCHING_UP)) for begin, end in pairwise([*begins, len(rows)])]
    whole = stretches if stretches[-1][1] - stretches[-1][0] == _CATCHING_UP else stretches[:-1]
    saved = [float(np.nansum(np.maximum(usual - seconds[begin + 1 : end], 0))) for begin, end in whole]
    longer = [float(seconds[begin]) - usual for begin, _ in whole]
    return process.is_on_gpu and bool(whole) and sum(saved) >= _MADE_UP_SHARE * sum(longer)


def _measure_before(process: Process, rows: Rows, regular: Ints) -> float:
    """Return by how many seconds each n-th iteration was longer than others before the first of ``rows``; 0 if not known.

    ``regular``: the indices of the pauses, each n rows after the last one.
    """
    period, first = int(regular[1] - regular[0]), int(rows["step"][regular[0]])
    before = process.steps[1 : np.searchsorted(process.steps["step"], rows["step"][0])]
    same = before["iteration_s"][(before["step"] - first) % period == 0][-_USUAL_STEPS:]
    if len(same) < _FEWEST_PAUSES:
        return 0.0
    return max(0.0, float(np.nanmedian(same)) - float(np.nanmedian(before["iteration_s"][-_USUAL_STEPS * period :])))


def _is_as_ever(process: Process, rows: Rows, period: float, pause_s: float) -> bool:
    """Whether iterations before ``rows`` paused as often: the loop is made so, as one that collects what it learns from."""
    before = process.steps[1 : np.searchsorted(process.steps["step"], rows["step"][0])]
    expected = len(before) / period
    paused = before["iteration_s"] >= np.median(rows["iteration_s"]) + pause_s / 2
    return expected < _FEWEST_PAUSES or int(paused.sum()) >= expected / 2


def _choose_loading(process: Process, rows: Rows) -> FindingKind:
    window = int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])
    if count_workers([process], *window) > 0:
        return _STARTING
    loader = find_loader_cause(process, *window)
    return loader.advise(_LOADING, _LOADING.advice) if loader is not None else _LOADING


def _estimate_seconds(process: Process, rows: Rows, known_ns: int, column: str) -> Floats | None:
    """Return the seconds of each step in a phase, or outside all phases.

    For a counted step, the other phases are assumed to take their usual time.
    """
    seconds = _read_seconds(rows, column)
    counted = np.isnan(seconds)
    if counted.any():
        phased = process.phased_steps_until(known_ns)[-_USUAL_STEPS:]
        if not len(phased):
            return None
        seconds[counted] = rows["iteration_s"][counted] - np.median(phased["iteration_s"] - _read_seconds(phased, column))
    return seconds


def _read_seconds(rows: Rows, column: str) -> Floats:
    return rows[column].astype(np.float64) if column else measure_between(rows)


def _may_be_load(process: Process, rows: Rows, line: StackLine) -> bool:
    """Whether other processes use the cores, which delays any line and the unknown phases of counted steps."""
    load = measure_load(process.recording, process.host, int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1]))
    if load is None:
        return False
    return (line.known_call is None and load.is_starved) or (bool(rows["counted"].any()) and load.is_disturbed)
