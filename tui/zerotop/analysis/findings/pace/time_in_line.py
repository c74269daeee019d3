"""Each iteration spends a notable time in a line of the job's code between the phases: from the first steps on, or later.

From some step on, most iterations lose time there, however much they vary for other reasons. Iterations that vary, because
other processes use the cores or because only some are slow, show no change of level. The stack samples do: they are taken
whenever a place lasts clearly longer than usual, and name the same line each time.

Findings that already name the line are not repeated. Their detectors run before this one, because detectors run in the order
of their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.code_line import list_own
from zerotop.analysis.findings.support.evidence import Floats, Group, Process, Rows
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.analysis.findings.support.gpu_use import measure_gpu_use
from zerotop.analysis.findings.support.lines.line_findings import is_cause, is_named, line_values, measure_between, name_line
from zerotop.analysis.findings.support.lines.stack_lines import (
    BETWEEN,
    SHARE,
    SLOW,
    UNSEEN,
    Delay,
    StackLine,
    find_line,
    find_repeated_waits,
    find_shared_line,
    is_training,
    select_events_in,
    select_stacks,
)
from zerotop.analysis.findings.support.links import TO_DEAD_THREADS, Kinds, is_in_change, is_lost_in_same_line
from zerotop.analysis.findings.support.thresholds import BETWEEN_SECONDS, SHOWN_SHARE
from zerotop.analysis.findings.support.window import SearchWindow, in_each_attempt
from zerotop.analysis.formatting import Text
from zerotop.analysis.steps.sampled_parts import Part, measure_in_steps
from zerotop_probe.recording.events import GraphReplays, Stacks

_ALWAYS = FindingKind(
    name="time_between_phases",
    severity=Severity.WARNING,
    confidence=0.9,
    headline="{share:percent} of each {iteration_s:seconds} iteration is spent between the phases",
    details=(
        "In steps {step} to {last_step}, {between_s:seconds} of it are outside data, forward, backward and step,"
        " {most} of that at {line}."
    ),
    superseded_by=(Kinds(is_lost_in_same_line, "workers_restarted"),),
)
# Code of the job's own, from its first steps on, may be how the job is meant to be: rollouts, or a sampler of graphs.
_OWN = _ALWAYS.with_changes(severity=Severity.INFO)
_WAITS = _ALWAYS.with_changes(
    details=(
        f"{_ALWAYS.details} Its function waits at several lines in a row, and only the first waits for earlier work: the GPU"
        " is idle in {idle:percent} of the time."
    )
)
_LATER = FindingKind(
    name="time_lost_in_line",
    severity=Severity.WARNING,
    confidence=0.85,
    headline="{added_s:seconds} of each {iteration_s:seconds} iteration are lost from step {step} on",
    details=(
        "The time between the phases[ of {concerned:ranks}] is {between_s:seconds} in steps {step} to {last_step} instead of"
        " {before_s:seconds}. Most of it is spent at {line}, in {steps_share:percent} of the sampled steps."
    ),
    explained_by=(*TO_DEAD_THREADS, Kinds(is_lost_in_same_line, "data_stall")),
    superseded_by=(Kinds(is_in_change, "iteration_shift"), *_ALWAYS.superseded_by),
)
_SAMPLED = " Some of the samples are of later steps, up to {sampled_step}."
# Findings after which steps before and after are not told together.
_CHANGES = ("iteration_shift", "iteration_drift", "time_lost_in_line", "data_stall")
# From the first steps on: the share of each iteration that is worth a finding.
BETWEEN_SHARE = 0.15
# The first steps, without the very first one.
_FIRST = slice(1, 21)
# Samples that show a line.
_FEWEST_SAMPLES = 10
# A GPU that is busy in more of the time does not wait for the host.
_BUSY_SHARE = 0.9
# The share of each iteration in which a function waits for the GPU again and again.
_REPEATED_SHARE = 0.05
# Later: samples that show a line: the seconds that they stand for, and the steps from the first to the last of them.
_SAMPLED_S, _SAMPLED_STEPS = 1.0, 15
# The line's share of the samples between the phases since then.
_LINE_SHARE = 0.6
# Samples of usual slowness that show a line: their number.
_FEWEST_USUAL = 5
# Steps with phases before it and after it that are compared.
_FEWEST_STEPS = 8
_MOST_STEPS = 50
# The first steps load and allocate.
_FIRST_STEPS = 5
# The time lost on average: seconds, and as a share of an iteration. If only few steps lose it, it is a pause.
_LOST_S, _LOST_SHARE = 0.01, 0.10
_LEAST_STEPS_SHARE = 0.4
# Of samples of usual slowness, which show a place that takes a notable share of most iterations: less is enough, if the
# medians of so many iterations before and after, counted ones included, differ by half of it.
_USUAL_LOST_S, _USUAL_LOST_SHARE, _USUAL_STEPS_SHARE = 0.001, 0.05, 0.75
_COMPARED_STEPS = 200
# The time between the phases grows by at least this many times the growth within them. Otherwise everything is slower, for
# example because other processes use the cores.
_TIMES_AS_LONG = 2.0
_LEAST_BETWEEN_S, _USUAL_LEAST_S = 0.002, 0.0005
# Samples are examined again after this share of more ones, so that the work grows linearly with the recording.
_MORE_SAMPLES, _MORE_SECONDS = 1 / 8, 1 / 4


class _Thresholds(NamedTuple):
    """What makes time lost at a line notable, by the kind of its samples."""

    measure: Callable[[Floats], Any]  # of the steps
    least_s: float
    lost_s: float
    lost_share: float
    steps_share: float


_SLOWLY = _Thresholds(np.mean, _LEAST_BETWEEN_S, _LOST_S, _LOST_SHARE, _LEAST_STEPS_SHARE)
_USUALLY = _Thresholds(np.median, _USUAL_LEAST_S, _USUAL_LOST_S, _USUAL_LOST_SHARE, _USUAL_STEPS_SHARE)


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report for each attempt if all ranks spend time there, and once each line that takes more time from a step on.

    The former is told again with more steps, as samples come, up to a change of pace; and with the figures of the steps
    before a change that is known later. If only one rank spends time there from the first steps on, it is a straggler.
    """
    group = window.subject
    for event in _read_new(window, group.lead, SHARE, of=_ALWAYS):
        samples = window.total(_count_samples(event), _ALWAYS)
        if not group.has_stages and window.has_grown(samples, _FEWEST_SAMPLES, _MORE_SAMPLES, _ALWAYS):
            yield from _check_whole_training(group, event)
    for change in window.items([one for one in group.findings if one.name in _CHANGES], _CHANGES):
        yield from _end_before(group, change)
    reasons = [(process, why) for process in group.processes for why in (SLOW, SHARE)]
    new = [(process, event) for process, why in reasons for event in _read_new(window, process, why, of=_LATER)]
    for process, event in sorted(new, key=lambda one: one[1].unix_ns):  # the first rank that shows a line names it
        yield from _check_change(window, process, event)


def _read_new(window: SearchWindow[Group], process: Process, why: str, *, of: FindingKind) -> list[Stacks]:
    return select_events_in(window.items(process.events_of(Stacks), (process, why, of)), (BETWEEN, UNSEEN), why)


def _count_samples(event: Stacks) -> int:
    """Return the number of samples between the phases."""
    if event.where == BETWEEN:
        return event.samples or 0
    return sum(stack.count or 0 for stack, _ in select_stacks(event, BETWEEN))


def _check_whole_training(group: Group, event: Stacks) -> Iterator[Finding]:
    lead, known_ns = group.lead, event.unix_ns
    rows = lead.phased_steps_until(known_ns)
    if len(rows) < 2 or _are_replays(lead, rows) or not all(_spends_time(one, known_ns) for one in group.processes):
        return
    begin_ns = int(rows["begin_unix_ns"][0])
    delay = Delay(lead, BETWEEN, begin_ns, known_ns, known_ns)
    line = find_line(delay, why=SHARE) or find_shared_line(delay, why=SHARE)
    if line is None or is_training(line.callees) or _has_begun_later(delay, line):
        return
    use = measure_gpu_use(lead, int(rows["begin_unix_ns"][1]), known_ns)
    kind = _OWN if line.known_call is None or line.known_call.waits_for_ranks else _ALWAYS
    evidence = _measure_whole(lead, rows[1:])
    cost = evidence["share"]
    if not is_cause(line, delay):
        repeated = find_repeated_waits(delay, why=SHARE)
        if repeated is None or not min(1 - use, repeated.share * cost) >= _REPEATED_SHARE:
            return
        line, kind, cost = repeated, _WAITS, min(1 - use, repeated.share * cost)
        evidence["idle"] = 1 - use
    if use >= _BUSY_SHARE or not _is_news(group, line, known_ns):
        return
    values = {"cost": cost, "last_step": int(rows["step"][-1]), **line_values(line)}
    named = name_line(kind, line)
    if kind is _OWN and line.known_call is None:
        named = named.with_changes(advice="", fix="")
    yield named.at_steps(group, rows[1:], evidence, known_ns=known_ns, **values)


def _are_replays(process: Process, rows: Rows) -> bool:
    """Whether CUDA graphs hold the forward and backward of most steps: they run between the phases."""
    return bool(process.events_of(GraphReplays)) and float(np.median(rows["micro_steps"])) == 0


def _end_before(group: Group, change: Finding) -> Iterator[Finding]:
    """Yield the finding about the whole training with other figures if a change of pace is within the steps of its own."""
    told = next((one for one in reversed(group.findings) if one.name == _ALWAYS.name), None)
    if told is None or told.kind is None or not isinstance(told.details, Text):
        return
    step, last_step, change_step = told.step or 0, told.details.values["last_step"], change.step or 0
    rows = group.lead.phased_steps_until(change.known_ns)
    rows = rows[(rows["step"] >= step) & (rows["step"] < change_step)]
    if change_step <= last_step and len(rows) >= _FEWEST_STEPS:
        evidence = _measure_whole(group.lead, rows)
        values = {**told.details.values, **evidence, "last_step": int(rows["step"][-1]), "sampled_step": last_step}
        kind, cost = told.kind.with_changes(details=told.kind.details + _SAMPLED), min(told.cost, evidence["share"])
        yield kind.at(group, told.begin_ns, change.known_ns, told.evidence | evidence, cost=cost, **values)


def _measure_whole(process: Process, rows: Rows) -> dict[str, float]:
    between = _measure_between(process, rows)
    return {"between_s": between.seconds, "iteration_s": between.iteration_s, "share": between.share}


def _measure_between(process: Process, rows: Rows, average: Callable[[Floats], Any] = np.median) -> Part:
    """Return the time between the phases from the first to the last of some steps with phases."""
    return measure_in_steps(process.steps, rows, measure_between(rows), average)


def _has_begun_later(delay: Delay, line: StackLine) -> bool:
    """Whether samples from the first half of a time are enough to show the line, and do not."""
    middle_ns = (delay.begin_ns + delay.end_ns) // 2 - delay.process.source.offset_ns
    early = [one for one in delay.process.events_of(Stacks) if one.why == SHARE and one.end_ns <= middle_ns]
    shown = [
        ((line.file, line.line, line.function) in list_own(one.frames, stack), stack.count or 0)
        for one in early
        for stack, _ in select_stacks(one, UNSEEN if one.where == UNSEEN else BETWEEN)
    ]
    return sum(count for _, count in shown) >= _FEWEST_SAMPLES and not any(at_line for at_line, _ in shown)


def _is_news(group: Group, line: StackLine, known_ns: int) -> bool:
    """Whether no finding names the line, or only the one to tell again, and the pace did not change since."""
    known = [one for one in group.findings if one.known_ns <= known_ns]
    told = [one for one in known if one.name == _ALWAYS.name]
    if not told:
        return not is_named(group, line, known_ns)
    return told[-1].named_line == line.location and not any(one.name in _CHANGES for one in known)


def _spends_time(process: Process, known_ns: int) -> bool:
    rows = process.phased_steps_until(known_ns)
    return all(
        len(part) > 0
        and float(np.median(measure_between(part))) >= BETWEEN_SECONDS
        and float(np.median(measure_between(part) / part["iteration_s"])) >= BETWEEN_SHARE
        for part in (rows[_FIRST], rows[1:])
    )


def _check_change(window: SearchWindow[Group], process: Process, event: Stacks) -> Iterator[Finding]:
    group, is_slow = window.subject, event.why == SLOW
    for stack, own in select_stacks(event, BETWEEN):
        if own is None or is_training(own.callees, BETWEEN):
            continue
        key = own.file, own.line
        at_line = process.source, event.why, *key
        total = window.total((stack.seconds if is_slow else stack.count) or 0, at_line)
        first = window.find_once(lambda: event, at_line) or event
        if (event.last_step or event.step or 0) - (first.step or 0) < _SAMPLED_STEPS:
            continue
        if not window.has_grown(total, _SAMPLED_S if is_slow else _FEWEST_USUAL, _MORE_SECONDS, at_line):
            continue
        begin_ns = first.begin_ns + process.source.offset_ns
        line = find_line(Delay(process, BETWEEN, begin_ns - 1, event.unix_ns, event.unix_ns), why=event.why)
        if line is not None and (line.file, line.line) == key and line.share >= _LINE_SHARE:
            told = window.keep(dict[Any, Finding], _LATER)
            finding = _measure_loss(group, process, (begin_ns, first.step or 0), line, event, told.get(at_line))
            is_told_elsewhere = at_line not in told and is_named(group, line, event.unix_ns)
            if finding is not None and not is_told_elsewhere and _has_changed(told.get(at_line), finding):
                told[at_line] = finding
                yield finding


def _has_changed(told: Finding | None, finding: Finding) -> bool:
    """Whether the figures of a finding differ from those that were told last."""
    names = ("added_s", "iteration_s")
    return told is None or any(abs(finding.evidence[one] / told.evidence[one] - 1) > SHOWN_SHARE for one in names)


def _measure_loss(
    group: Group, process: Process, first: tuple[int, int], line: StackLine, event: Stacks, told: Finding | None
) -> Finding | None:
    """Return a finding about the time lost at a line since its first sample (time, step), if it is notable.

    ``told``: what was told of it before; it keeps its first step.
    """
    known_ns, is_usual = event.unix_ns, event.why == SHARE
    begin_ns, step = first
    if not is_cause(line, Delay(process, BETWEEN, begin_ns, known_ns, known_ns)):
        return None
    if told is not None and told.step is not None:
        step = told.step
    elif is_usual:
        step = _find_begin(process, step, known_ns)
    before, after = _split_steps(process, step, known_ns)
    if min(len(before), len(after)) < _FEWEST_STEPS:
        return None
    measure, least_s, lost_s, lost_share, steps_share = _USUALLY if is_usual else _SLOWLY
    usual, now = (float(measure(measure_between(part))) for part in (before, after))
    iteration, added = float(measure(after["iteration_s"])), now - usual
    longer = measure_between(after) >= usual + max(added / 2, lost_s)
    times_as_long = max(now, least_s) / max(usual, least_s)
    is_notable = added >= max(lost_s, lost_share * iteration) and longer.mean() >= steps_share
    if not is_notable or times_as_long < _TIMES_AS_LONG * _measure_computing(after) / _measure_computing(before):
        return None
    if is_usual and not _are_iterations_longer(process, step, added / 2, known_ns):
        return None
    if line.known_call is None and measure_gpu_use(process, int(after["begin_unix_ns"][0]), known_ns) >= _BUSY_SHARE:
        return None  # the line may wait for the GPU, by a comparison for example
    is_alone = len(group.processes) > 1 and not any(
        _measure_added(other, step, known_ns) >= added / 2 for other in group.processes if other is not process
    )
    since = _select_since(process, step, known_ns)
    lost, before_s = _measure_between(process, since, measure), _measure_between(process, before, measure).seconds
    added = lost.seconds - before_s
    if added < lost_s:  # the steps with phases were longer than the others
        return None
    evidence = {"added_s": added, "iteration_s": lost.iteration_s, "between_s": lost.seconds, "before_s": before_s}
    return name_line(_LATER, line).at_steps(
        process,
        since,
        evidence | {"steps_share": float(longer.mean())},
        known_ns=known_ns,
        cost=added / lost.iteration_s,
        last_step=int(since["step"][-1]),
        concerned=(process.rank,) if is_alone else None,
        **line_values(line),
    )


def _find_begin(process: Process, step: int, known_ns: int) -> int:
    """Return the first step with phases in a row up to ``step`` that is nearer to those after it than to those before."""
    before, after = _split_steps(process, step, known_ns)
    if not len(before) or not len(after):
        return step
    early = measure_between(before)
    is_longer = early >= (np.median(early) + np.median(measure_between(after))) / 2
    count = int(np.argmin(is_longer[::-1])) if not is_longer.all() else 0
    return int(before["step"][-count]) if count else step


def _are_iterations_longer(process: Process, step: int, seconds: float, known_ns: int) -> bool:
    """Whether iterations, counted ones included, became longer by these seconds: a GPU may hide the time of the host."""
    rows = process.steps_until(known_ns)
    first = int(np.searchsorted(rows["step"], step))
    before, after = rows[_FIRST_STEPS:first][-_COMPARED_STEPS:], rows[first:][:_COMPARED_STEPS]
    return bool(np.median(after["iteration_s"]) - np.median(before["iteration_s"]) >= seconds)


def _split_steps(process: Process, step: int, known_ns: int) -> tuple[Rows, Rows]:
    """Return the steps with phases before a step, and those from it on."""
    rows, after = process.phased_steps_until(known_ns), _select_since(process, step, known_ns)
    return rows[_FIRST_STEPS : len(rows) - len(after)][-_MOST_STEPS:], after[:_MOST_STEPS]


def _select_since(process: Process, step: int, known_ns: int) -> Rows:
    """Return all steps with phases from a step on."""
    rows = process.phased_steps_until(known_ns)
    return rows[np.searchsorted(rows["step"], step) :]


def _measure_added(process: Process, step: int, known_ns: int) -> float:
    """Return the seconds by which a rank's time between the phases rose, per step, from a step on."""
    before, after = _split_steps(process, step, known_ns)
    if not len(before) or not len(after):
        return 0.0
    return float(measure_between(after).mean() - measure_between(before).mean())


def _measure_computing(rows: Rows) -> float:
    """Return the mean seconds of the phases that compute."""
    return max(1e-6, float((rows["forward_s"] + rows["backward_s"] + rows["step_s"]).mean()))
