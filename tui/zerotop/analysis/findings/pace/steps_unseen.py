"""A rank works on and no steps are seen: they are replays of a CUDA graph, or of something else that hooks cannot see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.code_line import read_line
from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.lines.stack_lines import find_deadline
from zerotop.recording.events.event_files import select_events
from zerotop.recording.samples import Ints, Rows
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import EVAL, PHASE_CODE

_KIND = FindingKind(
    name="steps_unseen",
    severity=Severity.INFO,
    confidence=0.7,
    headline="No steps seen since step {step}, but GPU {gpu} works: times and peaks end there",
    details=(
        "In the {quiet_s:seconds} after it no model was trained through PyTorch's modules, autograd and optimizers, and the"
        " GPU was used {use:percent} of the time. Steps in C++ or in replayed graphs are not visible. {measured}"
    ),
)
_REPLAYS = _KIND.with_changes(
    confidence=0.95,
    headline="No steps seen since step {step}: replays of a CUDA graph are not visible",
    details=(
        "In the {quiet_s:seconds} after it CUDA graphs were replayed {replays:,.0f} times[ at {line}], {rate:.1f} times a"
        " second[, and GPU {gpu} was used {use:percent} of the time]. {measured}"
    ),
)
_UPDATES = _KIND.with_changes(
    confidence=0.95,
    headline="{updates:,.0f} updates since step {step} replay CUDA graphs: no steps are seen singly",
    details=(
        "In the {quiet_s:seconds} after it the optimizer updated {rate:.1f} times a second, and CUDA graphs were replayed at"
        " least {replays:,.0f} times[ at {line}]: forward and backward in them are not visible. All updates are shown as"
        " parts of one step[; GPU {gpu} was used {use:percent} of the time]. {measured}"
    ),
)
_BACKWARDS = _KIND.with_changes(
    confidence=0.9,
    headline="No optimizer step since step {step}: {backwards:,.0f} forwards and backwards seen",
    details=(
        "In the {quiet_s:seconds} after it no optimizer made a step that PyTorch shows. Updates that a script makes itself,"
        " in hooks of gradients or by hand, are not visible[; a pass takes {pass_s:seconds} instead of {usual_s:seconds}]."
        " All passes are shown as parts of one step."
    ),
)
_LONGER = _BACKWARDS.with_changes(
    severity=Severity.WARNING,
    advice="See why the loop no longer calls the optimizer's step(), and what it does more in each pass.",
    fix="optimizer.step()",
)
_GROWING = _LONGER.with_changes(
    details=f"{_BACKWARDS.details} The first of them took {{first_s:seconds}}.",
    advice=(
        "See why the loop no longer calls the optimizer's step(), and detach what it carries from pass to pass: a graph that"
        " is kept grows with each."
    ),
    fix="",
)
_NEVER = _KIND.with_changes(
    confidence=0.9,
    headline="No optimizer step is seen: {backwards:,.0f} backwards in {seconds:seconds}",
    details=(
        "No optimizer of PyTorch made a step. Updates that a script makes itself are not visible, and hence no steps, their"
        " times and peaks. The last backwards came {pass_s:seconds} apart, the first ones {first_s:seconds}."
    ),
)
_NEVER_GROWING = _NEVER.with_changes(
    severity=Severity.WARNING,
    headline="Backwards come {pass_s:seconds} apart instead of {first_s:seconds}; no optimizer step is seen",
    details=(
        "{backwards:,.0f} were seen in {seconds:seconds}; one takes {backward_s:seconds} instead of"
        " {first_backward_s:seconds}. No optimizer of PyTorch made a step; updates that a script makes itself are not"
        " visible."
    ),
    advice=(
        "If tensors are carried from pass to pass, detach them: a graph that is kept grows with each, and so does its time."
    ),
)
_MEASURED = "Still measured: the use and memory of GPUs by NVML, processes, threads and output."
# Time without steps before it is worth a word (ns), and in iterations; the share of it in which the GPU must have worked.
_QUIET_NS, _ITERATIONS, _LEAST_USE = 10_000_000_000, 20, 0.2
# The same, and the fewest updates, where graphs are replayed between updates: no evaluation or checkpoint has any.
_UPDATED_NS, _MANY_UPDATES = 3_000_000_000, 20
# Backwards without a step: so many, and so many times as many as in a usual step. They are told again after each quarter of
# more time.
_MANY_BACKWARDS, _USUAL_TIMES, _MORE_TIME = 20, 10, 1.25
# Passes whose time is that of the moment; how many times as long as before, or as the first ones, they are if that counts.
_LAST_PASSES, _LONGER_TIMES, _GROWN_TIMES = 10, 2.0, 1.5
# Backwards in a process without any step that are worth a word.
_MANY_NEVER = 100
_MOST = 3
# The folders of PyTorch's code in which a step is in progress, or awaited: its first run may be compiled for long.
_STEP_CODE = (
    *("torch/_dynamo/", "torch/_functorch/", "torch/_inductor/", "triton/"),
    *("torch/autograd/", "torch/nn/modules/", "torch/utils/data/"),
)
_BACKWARD, _STEP = PHASE_CODE["backward"], PHASE_CODE["step"]


class _Gap(NamedTuple):
    """A time without steps, in unix nanoseconds: it begins with the end of ``step``, and is looked at a while later."""

    step: int
    begin_ns: int
    known_ns: int
    is_first: bool  # the first look
    micro_steps: int  # of a usual step before
    usual_s: float  # of one of them


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report some of the gaps of each attempt's lead."""
    if not len(window.subject.lead.steps) and not window.subject.engine.optimizer:
        yield from _tell_stepless(window)
    for gap in _find_gaps(window):
        if not gap.is_first or window.count_reports(_KIND) < _MOST:
            yield _explain_gap(window.subject, gap)


def _find_gaps(window: SearchWindow[Group]) -> Iterator[_Gap]:
    process, steps = window.subject.lead, window.subject.lead.steps
    has_replays = len(process.events_of(events.GraphReplays)) > 0
    first = max(0, window.steps(steps).start - 1)  # after the last one known before, the gap may still go on
    ends = np.append(steps["end_unix_ns"][first:], process.at.cursor_ns)
    quiet_ns = _UPDATED_NS if has_replays else _QUIET_NS
    for index in (first + np.flatnonzero(np.diff(ends) >= quiet_ns)).tolist() if len(steps) else ():
        before = steps[max(0, index - 50) : index + 1]
        usual_s = float(np.nanmedian(before["iteration_s"])) if np.isfinite(before["iteration_s"]).any() else 0.0
        micro_steps = max(1, int(np.median(before["micro_steps"])))
        end_ns, next_ns = (int(ends[number - first]) for number in (index, index + 1))
        usual_ns = max(_QUIET_NS, round(_ITERATIONS * usual_s * 1e9))
        updated = _find_updates(process, end_ns, end_ns + _UPDATED_NS) if has_replays else ()
        looks = _list_looks(process, end_ns, _UPDATED_NS if len(updated) >= _MANY_UPDATES else usual_ns, next_ns)
        for known_ns in window.items(looks, of=end_ns):
            yield _Gap(int(steps["step"][index]), end_ns, known_ns, known_ns == looks[0], micro_steps, usual_s / micro_steps)


def _tell_stepless(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report backwards of a rank that has made no step, again after each quarter of more time."""
    process = window.subject.lead
    begin_ns = window.find_once(lambda: _find_first_backward(process), of="stepless")
    if begin_ns is None:
        return
    for known_ns in window.items(_list_looks(process, begin_ns, _QUIET_NS, process.at.cursor_ns), of="stepless"):
        seen = _read_backwards(process, begin_ns, known_ns)
        if len(seen) < _MANY_NEVER:
            continue
        times = np.diff(seen["begin_ns"]) / 1e9, (seen["end_ns"] - seen["begin_ns"]) / 1e9
        firsts, lasts = (
            [float(np.median(some[part])) for some in times]
            for part in (slice(_LAST_PASSES, 3 * _LAST_PASSES), slice(-_LAST_PASSES, None))
        )
        evidence = {"backwards": float(len(seen)), "seconds": (known_ns - begin_ns) / 1e9}
        evidence |= dict(zip(("first_s", "first_backward_s", "pass_s", "backward_s"), (*firsts, *lasts), strict=True))
        is_growing = all(last >= _LONGER_TIMES * first for first, last in zip(firsts, lasts, strict=True))
        yield (_NEVER_GROWING if is_growing else _NEVER).at(process, begin_ns, known_ns, evidence, step=None)


def _find_first_backward(process: Process) -> int | None:
    """Return when the first backward of the training began, in unix nanoseconds; None before there is one."""
    seen = _read_backwards(process, 0, process.at.cursor_ns)
    return int(seen["begin_ns"][0]) + process.source.offset_ns if len(seen) else None


def _read_backwards(process: Process, begin_ns: int, end_ns: int) -> Rows:
    spans = process.read_phases(begin_ns, end_ns, "backward").rows
    return spans[spans["flags"] & EVAL == 0] if len(spans) else spans


def _list_looks(process: Process, begin_ns: int, quiet_ns: int, until_ns: int) -> list[int]:
    """Return when a gap is looked at: after it was quiet for a while, and after each quarter of more time."""
    looks: list[int] = []
    while begin_ns + quiet_ns <= until_ns and find_deadline(process, begin_ns, quiet_ns) >= begin_ns + quiet_ns:
        looks.append(begin_ns + quiet_ns)
        quiet_ns = round(_MORE_TIME * quiet_ns)
    return looks


def _explain_gap(group: Group, gap: _Gap) -> Finding | None:
    process = group.lead
    spans = process.read_phases(gap.begin_ns + 1, gap.known_ns, "forward", "backward", "step").rows
    trained = spans[spans["flags"] & EVAL == 0] if len(spans) else spans
    if len(trained) and (trained["phase"] == _STEP).any():
        if (trained["phase"] == _STEP).all() and len(trained) >= _MANY_UPDATES:
            return _tell_updates(group.lead, gap, len(trained))
        return None  # one of several optimizers made steps, and a step of the loop has one of each
    backwards = trained[trained["phase"] == _BACKWARD] if len(trained) else trained
    if len(backwards) >= max(_MANY_BACKWARDS, _USUAL_TIMES * gap.micro_steps):
        return _tell_backwards(group, gap, np.sort(backwards["end_ns"]))
    return _explain_quiet(group, gap) if gap.is_first and not len(trained) else None  # else a step is in progress


def _tell_backwards(group: Group, gap: _Gap, ends: Ints) -> Finding:
    """Return that forwards and backwards go on, and whether they take longer than in the steps before."""
    seconds = np.diff(ends) / 1e9
    first_s, pass_s = (float(np.median(part)) for part in (seconds[:_LAST_PASSES], seconds[-_LAST_PASSES:]))
    evidence: dict[str, float | None] = {"quiet_s": (gap.known_ns - gap.begin_ns) / 1e9, "backwards": len(ends)}
    is_longer, kind = 0 < _LONGER_TIMES * gap.usual_s <= pass_s, _BACKWARDS
    if is_longer:
        kind = _GROWING if pass_s >= _GROWN_TIMES * first_s else _LONGER
        evidence |= {"pass_s": pass_s, "usual_s": gap.usual_s, "first_s": first_s}
    values: dict[str, Any] = {} if is_longer else {"pass_s": None, "usual_s": None}
    cost = 1 - gap.usual_s / pass_s if is_longer else 0.0
    return kind.at(group.lead, gap.begin_ns, gap.known_ns, evidence, step=gap.step, cost=cost, **values)


def _find_updates(process: Process, begin_ns: int, end_ns: int) -> Rows:
    """Return the updates in a time without forwards and backwards; none if there were any of these."""
    rows = process.read_phases(begin_ns + 1, min(end_ns, process.at.cursor_ns), "forward", "backward", "step").rows
    return rows if len(rows) and (rows["phase"] == _STEP).all() else rows[:0]


def _tell_updates(process: Process, gap: _Gap, updates: int) -> Finding | None:
    """Return that the optimizer updates between replays of graphs; None without these."""
    replays = [event for event in process.events_of(events.GraphReplays) if event.unix_ns <= gap.known_ns]
    if not (count := _count_replays(replays, gap)):
        return None
    quiet_s, line = (gap.known_ns - gap.begin_ns) / 1e9, read_line(replays[-1])
    evidence = {"quiet_s": quiet_s, "updates": updates, "replays": count, "rate": updates / quiet_s}
    use, gpu = _measure_use(process, gap), process.gpu_key[1] if process.gpu_key is not None else None
    values: dict[str, Any] = {"line": line.text if line is not None else None, "gpu": gpu, "measured": _MEASURED}
    return _UPDATES.at(process, gap.begin_ns, gap.known_ns, {**evidence, "use": use}, step=gap.step, **values)


def _explain_quiet(group: Group, gap: _Gap) -> Finding | None:
    process = group.lead
    use, gpu = _measure_use(process, gap), process.gpu_key[1] if process.gpu_key is not None else None
    quiet_s = (gap.known_ns - gap.begin_ns) / 1e9
    evidence: dict[str, float | None] = {"quiet_s": quiet_s, "use": use}
    values: dict[str, Any] = {"gpu": gpu, "measured": _MEASURED}
    replays = [event for event in process.events_of(events.GraphReplays) if event.unix_ns <= gap.known_ns]
    if (count := _count_replays(replays, gap)) > 0:
        line = read_line(replays[-1])
        kind, evidence = _REPLAYS, evidence | {"replays": count, "rate": count / quiet_s}
        values["line"] = line.text if line is not None else None
    elif use is not None and use >= _LEAST_USE and len(group.processes) == 1 and not _is_busy_elsewhere(process, gap):
        kind = _KIND  # a rank that waits for others keeps its GPU busy, too
    else:
        return None
    return kind.at(process, gap.begin_ns, gap.known_ns, evidence, step=gap.step, **values)


def _is_busy_elsewhere(process: Process, gap: _Gap) -> bool:
    """Whether a phase began or ended after the last step, or samples show the rank in code that prepares or makes steps."""
    if any(len(process.records(name).read_window(gap.begin_ns + 1, gap.known_ns)) for name in ("begins", "spans")):
        return True
    sampled = select_events(process.events_of(events.Stacks), gap.begin_ns, gap.known_ns)
    return any(
        frame.file.startswith(_STEP_CODE)
        for event in sampled
        if event.begin_ns + process.source.offset_ns >= gap.begin_ns
        for frame in event.frames
    )


def _measure_use(process: Process, gap: _Gap) -> float | None:
    """Return the share of the time in which the GPU worked, as NVML says; None without NVML."""
    if process.gpu_key is None or not len(samples := process.gpu_samples.read_window(gap.begin_ns, gap.known_ns)):
        return None
    percent = samples.rows["utilization_percent"]
    used = percent[percent >= 0]
    return float(np.mean(used)) / 100 if len(used) else None


def _count_replays(replays: list[events.GraphReplays], gap: _Gap) -> int:
    """Return the replays since the gap began, which are recorded with each power of two."""
    before = max((event.replays for event in replays if event.unix_ns <= gap.begin_ns), default=0)
    return max((event.replays for event in replays if event.unix_ns > gap.begin_ns), default=before) - before
