"""A rank works on and no steps are seen: they are replays of a CUDA graph, or of something else that hooks cannot see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.code_line import read_line
from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.lines.stack_lines import find_deadline
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
_BACKWARDS = _KIND.with_changes(
    confidence=0.9,
    headline="No steps seen since step {step}: {backwards:,.0f} backwards without an update of an optimizer",
    details=(
        "Updates that a script makes itself, in hooks of gradients or by hand, are not visible. Forwards and backwards are"
        " shown as parts of one step. {measured}"
    ),
)
_MEASURED = "Still measured: the use and memory of GPUs by NVML, processes, threads and output."
# Time without steps before it is worth a word (ns), and in iterations; backwards in that time, and the share of it in which
# the GPU must have worked.
_QUIET_NS, _ITERATIONS, _MANY_BACKWARDS, _LEAST_USE = 10_000_000_000, 20, 100, 0.2
_MOST = 3
_FORWARD, _BACKWARD = PHASE_CODE["forward"], PHASE_CODE["backward"]


class _Gap(NamedTuple):
    """A time without steps, in unix nanoseconds: it begins with the end of ``step``, and was known a while later."""

    step: int
    begin_ns: int
    known_ns: int


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report some of the gaps of each attempt's lead."""
    for gap in _find_gaps(window):
        if window.count_reports(_KIND) < _MOST:
            yield _explain_gap(window.subject, gap)


def _find_gaps(window: SearchWindow[Group]) -> Iterator[_Gap]:
    process, steps = window.subject.lead, window.subject.lead.steps
    first = max(0, window.steps(steps).start - 1)  # after the last one known before, the gap may still go on
    ends = np.append(steps["end_unix_ns"][first:], process.at.cursor_ns)
    for index in (first + np.flatnonzero(np.diff(ends) >= _QUIET_NS)).tolist() if len(steps) else ():
        durations = steps["iteration_s"][max(0, index - 50) : index + 1]
        usual_s = float(np.nanmedian(durations)) if np.isfinite(durations).any() else 0.0
        end_ns, next_ns = (int(ends[number - first]) for number in (index, index + 1))
        known_ns = end_ns + max(_QUIET_NS, round(_ITERATIONS * usual_s * 1e9))
        if next_ns >= known_ns and find_deadline(process, end_ns, known_ns - end_ns) >= known_ns:
            yield _Gap(int(steps["step"][index]), end_ns, known_ns)


def _explain_gap(group: Group, gap: _Gap) -> Finding | None:
    process = group.lead
    spans = process.read_phases(gap.begin_ns, gap.known_ns, "forward", "backward").rows
    trained = spans[spans["flags"] & EVAL == 0] if len(spans) else spans
    backwards = int((trained["phase"] == _BACKWARD).sum()) if len(trained) else 0
    use, gpu = _measure_use(process, gap), process.gpu_key[1] if process.gpu_key is not None else None
    quiet_s = (gap.known_ns - gap.begin_ns) / 1e9
    evidence: dict[str, float | None] = {"quiet_s": quiet_s, "use": use}
    values: dict[str, Any] = {"gpu": gpu, "measured": _MEASURED}
    replays = [event for event in process.events_of(events.GraphReplays) if event.unix_ns <= gap.known_ns]
    if backwards >= _MANY_BACKWARDS:
        kind, evidence = _BACKWARDS, evidence | {"backwards": backwards}
    elif len(trained):
        return None  # a step is in progress
    elif (count := _count_replays(replays, gap)) > 0:
        line = read_line(replays[-1])
        kind, evidence = _REPLAYS, evidence | {"replays": count, "rate": count / quiet_s}
        values["line"] = line.text if line is not None else None
    elif use is not None and use >= _LEAST_USE and len(group.processes) == 1 and not _is_busy_elsewhere(process, gap):
        kind = _KIND  # a rank that waits for others keeps its GPU busy, too
    else:
        return None
    return kind.at(process, gap.begin_ns, gap.known_ns, evidence, step=gap.step, **values)


def _is_busy_elsewhere(process: Process, gap: _Gap) -> bool:
    """Whether an evaluation, a checkpoint or another phase ended after the last step."""
    return len(process.records("spans").read_window(gap.begin_ns + 1, gap.known_ns)) > 0


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
