"""A single pause that costs as much as many iterations: in one step, or in one evaluation or generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.causes.library_calls import find_library_call
from zerotop.analysis.findings.support.causes.recompilations import find_failed_assumption
from zerotop.analysis.findings.support.causes.step_change import measure_compiling, name_part
from zerotop.analysis.findings.support.causes.thread_causes import find_busy_threads
from zerotop.analysis.findings.support.lines import line_findings, stack_lines
from zerotop.analysis.findings.support.lines.known_calls import COMPILE, RECOMPILES
from zerotop.analysis.findings.support.links import (
    TO_DEAD_THREADS,
    Kinds,
    begins_together,
    begins_with_skips,
    is_one_of_pauses,
    is_simultaneous,
)
from zerotop.analysis.findings.support.thresholds import FAR_SHARE, SPIKE_SIMILAR_SHARE, WARM_UP_STEPS
from zerotop.analysis.formatting import Text
from zerotop.analysis.hangs.stacks import read_silent_stacks
from zerotop.analysis.hangs.waits import ENDS, find_wait
from zerotop.analysis.script_terms import PROFILE
from zerotop.analysis.stats.change_points import LEVEL_STEPS, SETTLED_STEPS, SHIFT_STEPS
from zerotop.recording.events.event_files import select_events
from zerotop.recording.keys import identify_process
from zerotop.recording.reader import Event
from zerotop.recording.samples import Floats, Rows
from zerotop_probe.recording.event_values import SILENT
from zerotop_probe.recording.events import Goodbye, Stacks, Tensors
from zerotop_probe.recording.tables import PHASE_CODE

_KIND = FindingKind(
    name="long_pause",
    confidence=0.9,
    lost_once="pause_s",
    headline="Step {step} took {pause_s:seconds} longer than the others",
    details=(
        "{pause_s:seconds} are as long as {iterations:.0f} iterations[, spent {part}][, {most} of it at {line}][; {cause}]."
    ),
    advice="Trace that step with torch.profiler, to see what it does.",
    fix=PROFILE,
    explained_by=(*TO_DEAD_THREADS, Kinds(begins_with_skips, "loss_not_finite")),
    repeats=(Kinds(is_simultaneous, "rank_stopped", "checkpoint_pause"),),
    superseded_by=(
        Kinds(begins_together, "iteration_shift"),
        Kinds(is_one_of_pauses, "data_stall", "repeated_pause"),
        Kinds(is_simultaneous, "hung_ranks", "steps_unseen", "runs_after_error"),
    ),
)
_EVALUATION = _KIND.with_changes(
    severity=Severity.INFO,
    headline="An evaluation took {pause_s:seconds}, as long as {iterations:.0f} iterations",
    details="Training stood still for it before step {step}[, most of the time at {line}].",
    advice="",
    fix="",
)
_RECOMPILED = _KIND.with_changes(
    headline="torch.compile compiled again {times:.0f} times since step {step}: {pause_s:seconds}",
    details="Pauses of {longest_s:seconds} or less take {share:percent} of the training so far[, {most} of it at {line}]."
    "[ The last check that failed: {failed}.]",
    advice=COMPILE.advice,
    fix=RECOMPILES,
)
_SEE_ASSUMPTION = "An assumption of torch.compile keeps changing: with this it prints which one."
_UNFINISHED = _KIND.with_changes(
    headline="Step {step} has taken {pause_s:seconds}, others {iteration_s:seconds}[: {place}]",
    details="It is as long as {iterations:.0f} iterations, and has not ended[; {cause}].",
    advice="See what the rank does: its stacks are on the Ranks screen.",
    fix="py-spy dump --pid {pid}",
)
_ENDED = _UNFINISHED.with_changes(
    headline="Step {step} took {pause_s:seconds}, others {iteration_s:seconds}[: {place}]",
    details="It is as long as {iterations:.0f} iterations[, with {apart} before it][; {cause}].",
    advice=_KIND.advice,
    fix=_KIND.fix,
)
_WITHOUT_STEPS = _UNFINISHED.with_changes(
    headline="Forwards without any optimizer step since step {last_step}: {pause_s:seconds}",
    details=(
        "After that step {forwards:.0f} forwards or more were made, and no backward; before, a step took"
        " {iteration_s:seconds}."
    ),
    advice=(
        "If they are meant to train, see where the script skips the backward, as of a batch whose loss is NaN or above a"
        " limit. If they evaluate, run them under torch.no_grad()."
    ),
)
_BY_THREAD = "Python runs one thread at a time: move the work at {location} to a separate process."
# The fewest forwards outside evaluations, without a backward, that are no part of one long step.
_FEWEST_FORWARDS = 16
# A step that has not ended is told with a sample of its silence, once it has taken so long (seconds, iterations) and longer
# than all steps before together; then again with this many times as long.
_UNFINISHED_S, _UNFINISHED_ITERATIONS, _LONGER_TIMES = 10.0, 100.0, 1.25
_APART = {"an evaluation": "eval_s", "a checkpoint": "checkpoint_s"}
_PLACES = ("data", "forward", "backward", "step", stack_lines.BETWEEN, stack_lines.UNSEEN)
# A pause is told if it takes these seconds, this many iterations, and this share of the training so far or half a minute.
_LEAST_S, _LEAST_ITERATIONS = 2.0, 30.0
_LEAST_SHARE, _MOST_S = 0.02, 30.0
# An evaluation is expected to take a while: it takes this share of the training so far.
_EVALUATION_SHARE = 0.1
_RECOMPILED_SHARE = 0.2  # of the training so far, in pauses in which torch.compile compiles again
# The most steps that are looked at together.
_MOST_READ = 1024


class _Pause(NamedTuple):
    """Steps that took long, up to the first one that did not."""

    group: Group
    rows: Rows
    seconds: float  # in all, beyond the usual time
    usual_s: float
    known_ns: int
    is_evaluation: bool
    process: Process
    column: str  # of the phase that took the time; empty if it is unknown
    compiled: tuple[_Pause, ...] = ()  # up to this one, in which torch.compile compiled, if these steps are several

    def find_delay(self) -> stack_lines.Delay:
        """Return where the time is lost."""
        where = "eval" if self.is_evaluation else line_findings.PLACES[self.column] if self.column else stack_lines.BETWEEN
        begin_ns, end_ns = int(self.rows["begin_unix_ns"][0]), int(self.rows["end_unix_ns"][-1])
        return stack_lines.Delay(self.process, where, begin_ns, end_ns, self.known_ns, is_all_work=self.is_evaluation)

    @property
    def is_by_probe(self) -> bool:
        """Whether an older probe took most of it, to search for the holders of tensors."""
        delay = self.find_delay()
        counts = select_events(self.process.events_of(Tensors), delay.begin_ns, delay.end_ns)
        return any((count.seconds or 0.0) >= self.seconds / 2 for count in counts if count.unix_ns <= delay.end_ns)


class _Unfinished(NamedTuple):
    """A step that was told while it lasted."""

    step: int
    begin_ns: int
    usual_s: float  # an iteration before it
    trained_s: float  # in all before it


class _Read(NamedTuple):
    """The number of steps that were looked at, the pause in the last of them, and all in which torch.compile compiled."""

    until: int
    pause: _Pause | None = None
    compiling: tuple[_Pause, ...] = ()


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report the first pause of each attempt, and later ones that are notably longer."""
    for pause, found in window.await_each(_find_pauses(window), lambda pause: stack_lines.await_line(pause.find_delay())):
        is_named = found.line is not None and line_findings.is_named(window.subject, found.line, found.known_ns)
        if (pause.compiled or not is_named) and not pause.is_by_probe:
            yield _build_finding(pause, found)
    yield from _find_unfinished(window)


def _find_unfinished(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report a step that takes longer than all before it, while it lasts, and its end."""
    lead = window.subject.lead
    begun: list[_Unfinished] = []
    for event in stack_lines.select_events_in(window.items(lead.events_of(Stacks)), _PLACES, SILENT):
        steps = lead.steps_until(event.unix_ns)
        if len(steps) <= SETTLED_STEPS:
            continue
        begin_ns, step = int(steps["end_unix_ns"][-1]), int(steps["step"][-1]) + 1
        lasted, usual = (event.unix_ns - begin_ns) / 1e9, _find_usual(steps["iteration_s"])
        trained = float(np.nansum(steps["iteration_s"]))
        is_long = lasted >= max(_UNFINISHED_S, _UNFINISHED_ITERATIONS * usual, trained)
        if (
            is_long
            and not any(_has_ended(process, begin_ns, event) for process in window.subject.processes)
            and window.is_news(lasted, lambda told, now: now >= _LONGER_TIMES * told, step)
        ):
            now = _Unfinished(step, begin_ns, usual, trained)
            begun += [now] if window.is_news(step, lambda *_: False, now) else []
            kind = _WITHOUT_STEPS if _count_forwards(lead, begin_ns, event.unix_ns) >= _FEWEST_FORWARDS else _UNFINISHED
            yield _build_unfinished(window.subject, kind, now, event.unix_ns)
    for one, row in window.await_each(begun, lambda one: _find_end(lead.steps, one.begin_ns), "ends"):
        apart = ", ".join(name for name, column in _APART.items() if row[column] >= row["iteration_s"])
        yield _build_unfinished(window.subject, _ENDED, one, int(row["end_unix_ns"]), apart or None)


def _count_forwards(process: Process, begin_ns: int, until_ns: int) -> int:
    """Return the recorded forwards outside other phases between two moments, after which no backward was made; else 0."""
    samples = process.records("spans").read_window(begin_ns, until_ns)
    if not len(samples):
        return 0
    outermost = samples.rows[samples.rows["depth"] == 0]
    has_backward = bool((outermost["phase"] == PHASE_CODE["backward"]).any())
    return 0 if has_backward else int((outermost["phase"] == PHASE_CODE["forward"]).sum())


def _find_end(steps: Rows, begin_ns: int) -> Any:
    """Return the first step that ended after a moment; None while there is none."""
    later = steps[np.searchsorted(steps["end_unix_ns"], begin_ns, "right") :][:1]
    return later[0] if len(later) else None


def _has_ended(process: Process, begin_ns: int, event: Event) -> bool:
    """Whether the process waits for threads, processes or loader workers to end: its training is over."""
    key = identify_process(process.source)
    stacks = read_silent_stacks(process.recording.recording, key, begin_ns, event.unix_ns)
    return bool(stacks) and find_wait(stacks[-1].training).kind in ENDS


def _build_unfinished(group: Group, kind: FindingKind, one: _Unfinished, until_ns: int, apart: str | None = None) -> Finding:
    """Return a finding about a step as it was at a time. ``apart``: what took as long before it, if that is known."""
    lasted = (until_ns - one.begin_ns) / 1e9
    evidence = {"pause_s": lasted, "iteration_s": one.usual_s, "share": lasted / (lasted + one.trained_s)}
    threads = find_busy_threads(group.lead, one.begin_ns, until_ns)
    values: dict[str, Any] = dict(line_findings.line_values(None))
    if threads and threads[0].line is not None:
        line = threads[0].line
        values = {"place": line.place, "line": line.text, "location": line.location}
        kind = kind.with_changes(advice=_BY_THREAD, fix="{location}")
    cores = sum(thread.cores for thread in threads)
    cause = threads[0].describe("", len(threads) - 1, cores) if threads else None
    if kind is _WITHOUT_STEPS:
        evidence["forwards"] = _count_forwards(group.lead, one.begin_ns, until_ns)
    evidence["iterations"] = evidence["pause_s"] / evidence["iteration_s"]
    pid = group.lead.source.pid
    values |= {"step": one.step, "last_step": one.step - 1, "cause": cause, "pid": pid, "apart": apart}
    return kind.at(group, one.begin_ns, until_ns, evidence, cost=evidence["share"], **values)


def _find_pauses(window: SearchWindow[Group]) -> Iterator[_Pause]:
    trained_s = cache(lambda: np.nancumsum(window.subject.lead.steps["iteration_s"]))  # only if needed: of a million steps
    for read in window.extend(partial(_read_next, window.subject, trained_s), 0):
        pause = read.pause
        if pause is not None and (pause.compiled or window.is_news(pause.seconds, _is_longer, pause.is_evaluation)):
            yield pause


def _read_next(group: Group, trained_s: Callable[[], Floats], last: _Read | None) -> _Read | None:
    """Return the next steps, up to a pause or without one; None while there are none, or the last of them may be a pause.

    ``trained_s``: the seconds of training up to each step.
    """
    last = last or _Read(SETTLED_STEPS)  # the first ones load and compile
    steps, begin, compiling = group.lead.steps, last.until, last.compiling
    seconds, evaluated = steps["iteration_s"], steps["eval_s"]
    near = slice(begin, begin + _MOST_READ)
    is_long = (seconds[near] >= _LEAST_S) | (evaluated[near] >= _LEAST_S)
    if not is_long.any():
        return _Read(begin + len(is_long), None, compiling) if len(is_long) else None
    index = begin + int(np.argmax(is_long))
    usual, trained = _find_usual(seconds[:index]), float(trained_s()[index - 1])
    if evaluated[index] >= _LEAST_S:
        pause, known_ns = float(evaluated[index]), int(steps["end_unix_ns"][index])
        is_notable = _is_notable(pause, usual, _EVALUATION_SHARE * trained)
        found = _Pause(group, steps[index : index + 1], pause, usual, known_ns, True, group.lead, "")
        return _Read(index + 1, found if is_notable else None, compiling)
    end = index + 1
    # So many long steps are no pause: no more are looked at, as there may be nothing but long steps.
    while end < min(len(steps), index + SHIFT_STEPS) and seconds[end] >= max(_LEAST_S, seconds[index] / 2):
        end += 1
    goodbyes = group.lead.events_of(Goodbye) if end == len(steps) else ()
    if end == len(steps) and end - index < SHIFT_STEPS and not goodbyes:  # the next step shows whether it was a pause
        return None
    pause = float(seconds[index:end].sum()) - (end - index) * usual
    is_change = end - index >= SHIFT_STEPS or (
        end - index > 1 and seconds[index : index + 2].sum() >= FAR_SHARE * np.nansum(seconds[: index + 2])
    )
    if is_change or not _is_notable(pause, usual, min(_LEAST_SHARE * trained, _MOST_S)):
        return _Read(end, None, compiling)
    known_ns = goodbyes[-1].unix_ns if goodbyes else int(steps["end_unix_ns"][end])
    place = _find_place(group, steps[index], known_ns)
    found = _Pause(group, steps[index:end], pause, usual, known_ns, False, *place)
    if not _is_compiling(found):
        return _Read(end, found, compiling)
    together = (*compiling, found)
    is_notable = sum(one.seconds for one in together) >= _RECOMPILED_SHARE * float(trained_s()[end - 1])
    is_again = sum(len(one.rows) for one in together) > 1
    return _Read(end, found._replace(compiled=together if is_notable and is_again else ()), together)


def _find_usual(seconds: Floats) -> float:
    """Return the usual time of the next step; if most of the very last steps take longer, they are the new pace."""
    return float(max(np.nanmedian(seconds[-LEVEL_STEPS:]), np.nanmedian(seconds[-SETTLED_STEPS:])))


def _is_compiling(pause: _Pause) -> bool:
    """Whether torch.compile took most of a pause."""
    compiled = measure_compiling(pause.group.lead, pause.rows)
    return compiled.graphs > 0 and compiled.seconds >= pause.seconds / len(pause.rows) / 2


def _build_recompiled(pause: _Pause, found: stack_lines.FoundLine) -> Finding:
    """Return one finding for several pauses, placed at the first; it replaces the finding of the first pause."""
    pauses, steps = pause.compiled, pause.group.lead.steps_until(found.known_ns)
    lost = [float(second) - one.usual_s for one in pauses for second in one.rows["iteration_s"]]
    trained_s = float(np.nansum(steps["iteration_s"]))
    evidence = {"pause_s": sum(lost), "longest_s": max(lost), "times": len(lost), "share": sum(lost) / trained_s}
    kind = _RECOMPILED if found.line is not None else _RECOMPILED.with_changes(advice=_SEE_ASSUMPTION)
    begin_ns, end_ns = pauses[0].find_delay().begin_ns, pause.find_delay().end_ns
    failed = find_failed_assumption(pause.group.lead, begin_ns, end_ns, found.known_ns)
    if failed is not None:
        kind = kind.with_changes(advice="{remedy}", fix="{setting}")
    values = {
        "failed": failed and failed.text,
        "remedy": failed and failed.advice[0],
        "setting": failed and failed.advice[1],
    }
    rows, values = pauses[0].rows, {**values, **line_findings.line_values(found.line)}
    return kind.at_steps(pause.group, rows, evidence, known_ns=found.known_ns, **values)


def _is_notable(pause_s: float, usual_s: float, least_s: float) -> bool:
    return pause_s >= max(_LEAST_S, _LEAST_ITERATIONS * usual_s, least_s)


def _is_longer(last_s: float, pause_s: float) -> bool:
    return pause_s > last_s * (1 + SPIKE_SIMILAR_SHARE)


def _find_place(group: Group, step: Rows, known_ns: int) -> tuple[Process, str]:
    """Return the rank that spent most time of its own in a step, and in which phase; without phases the lead and ""."""
    found: list[tuple[bool, float, Process, str]] = []
    for process in group.processes:
        rows = process.phased_steps_until(known_ns)
        rows = rows[rows["step"] == step["step"]]
        if len(rows):
            parts = {name: float(rows[name][0]) for name in line_findings.PLACES if name != "other_s"}
            parts["other_s"] = float(line_findings.measure_between(rows)[0])
            column = max(parts, key=lambda name: parts[name])
            # The other ranks wait for this one where they communicate.
            is_own = column in ("data_s", "other_s")
            found.append((is_own, parts[column], process, column))
    if not found:
        return group.lead, ""
    return max(found, key=lambda one: one[:2])[2:]


def _build_finding(pause: _Pause, found: stack_lines.FoundLine) -> Finding:
    if pause.compiled:
        return _build_recompiled(pause, found)
    kind, line, steps = _EVALUATION if pause.is_evaluation else _KIND, found.line, pause.group.lead.steps
    compiled = measure_compiling(pause.group.lead, pause.rows)
    if line is not None and not pause.is_evaluation and line_findings.is_cause(line, pause.find_delay()):
        kind = line_findings.name_line(kind, line)
    elif pause.is_evaluation and line is not None:
        kind = kind.with_changes(headline=f"{kind.headline}: {{place}}")
    is_compiling = _is_compiling(pause)
    is_warm_up = line is None and int(np.searchsorted(steps["step"], pause.rows["step"][0])) <= WARM_UP_STEPS
    if is_compiling or is_warm_up:
        kind = kind.with_changes(severity=Severity.INFO)
    cause = None
    if is_compiling:
        delay = pause.find_delay()
        failed = find_failed_assumption(pause.group.lead, delay.begin_ns, delay.end_ns, found.known_ns)
        compiling = "torch.compile compiled {graphs:count graph}[; the check that failed: {failed}]"
        cause = Text(compiling, {"graphs": compiled.graphs, "failed": failed and failed.text})
        if failed is not None:
            kind = kind.with_changes(advice=failed.advice[0], fix=failed.advice[1])
    if line is None and not (is_compiling or pause.is_evaluation):
        delay = pause.find_delay()
        call = find_library_call(delay.process, delay.begin_ns, delay.end_ns, found.known_ns)
        if call is not None:
            cause, (advice, fix) = call
            # Libraries prepare kernels for sizes that are new to them: nothing can be done where no advice is known.
            kind = kind.with_changes(advice=advice, fix=fix, severity=kind.severity if advice else Severity.INFO)
    evidence = {"pause_s": pause.seconds, "iteration_s": pause.usual_s, "iterations": pause.seconds / pause.usual_s}
    return kind.at_steps(
        pause.group,
        pause.rows,
        evidence,
        known_ns=found.known_ns,
        part=name_part(pause.column) if pause.column else None,
        cause=cause,
        **line_findings.line_values(line),
    )
