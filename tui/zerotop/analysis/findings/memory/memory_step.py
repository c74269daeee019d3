"""From some step on, training steps permanently need more device memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.causes.batch_causes import has_more_forwards, name_owner, read_forwards
from zerotop.analysis.findings.support.links import Kinds, grew_with_leak, took_more_for_growth
from zerotop.analysis.findings.support.memory.looks import FoundLook, await_look, find_growth, find_scale, read_looks
from zerotop.analysis.findings.support.thresholds import JUMP_BYTES
from zerotop.analysis.formatting import Text, format_count
from zerotop.analysis.memory import leak_holders
from zerotop.analysis.memory.block_lines import Look
from zerotop.analysis.memory.tensor_inventory import HeldTensors
from zerotop.analysis.stats.change_points import ShiftFinder
from zerotop.analysis.steps.training_changes import describe_changes
from zerotop.recording.samples import Rows
from zerotop_probe.recording.event_values import PEAK
from zerotop_probe.recording.events import Tensors, TrainingChanged

_KIND = FindingKind(
    name="memory_step",
    severity=Severity.INFO,
    confidence=0.4,
    gpu_bytes="after_bytes - before_bytes",
    headline="Steps allocate up to {after_bytes:bytes} instead of {before_bytes:bytes} {since}",
    details="{cause}[; it began after step {earlier}][; {lines}][; {left:bytes} of the device are left].",
    advice="See what stays allocated: trace a step with the microscope (x on the Memory screen).",
    superseded_by=(Kinds(grew_with_leak, "memory_creep"), Kinds(took_more_for_growth, "batch_growth")),
)
_ROWS = _KIND.with_changes(confidence=0.9, advice="Keep the batch size of the steps before.", fix="{batch_size_fix}")
_LENGTH = _KIND.with_changes(
    confidence=0.9, advice="Cap the length of sequences, or group samples of similar length.", fix="{grouping_fix}"
)
_FORWARDS = _KIND.with_changes(confidence=0.85, advice="See which code calls the model more often in each step.")
_LARGER = _KIND.with_changes(
    confidence=0.7, advice="Cap the size of the inputs: the length of sequences, or the crop of images.", fix=""
)
_TRAINING = _KIND.with_changes(confidence=0.9, advice="", fix="")
_HELD = _KIND.with_changes(confidence=0.8, advice="{letting_go}", fix="{clearing}")
_AFTER_PAUSE = _KIND.with_changes(confidence=0.5)
_UNKNOWN = "No other change was recorded"
# Blocks become so many times as large if elements are of 4 bytes instead of 2, but for this share.
_WIDER_TYPE, _TYPE_SHARE = 2.0, 0.1
# By how many steps a change may be off.
_STEPS_OFF = 2


class _Step(NamedTuple):
    """Steps before and after the rise of their memory."""

    before: Rows
    after: Rows


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each higher plateau. That of the first real step has a finding of its own."""
    group, finder = window.subject, window.keep(ShiftFinder)  # reads each step once
    fresh = window.await_each(_find_steps(group, finder), partial(_await_look, group.lead))
    for step, found in window.follow(fresh, partial(_explain_later, group.lead)):
        yield _build_finding(group, step, found)


def _explain_later(lead: Process, told: tuple[_Step, FoundLook]) -> tuple[_Step, FoundLook] | None:
    """Return the step with another cause that is known by now: the probe looks for changes of the training now and then."""
    step, found = told
    times = [event.unix_ns for event in lead.events_of(TrainingChanged) if event.unix_ns > found.known_ns]
    text = _describe_training(lead, step, found.known_ns)
    if not times or _describe_training(lead, step, times[-1]) == text:
        return None
    known_ns = next(time_ns for time_ns in times if _describe_training(lead, step, time_ns) != text)
    return step, found._replace(known_ns=known_ns)


def _find_steps(group: Group, finder: ShiftFinder) -> Iterator[_Step]:
    steps = group.lead.phased_steps  # of several counted steps only the highest peak is known
    peaks = steps["allocated_peak_bytes"]
    for shift in finder.find_shifts(peaks):
        before, after = steps[shift.before], steps[shift.first : shift.last + 1]
        if min(before["allocated_peak_bytes"].min(), after["allocated_peak_bytes"].min()) <= 0:
            continue
        is_first_real = bool(before["skipped"].mean() > 0.5 > after["skipped"].mean())
        is_jump = peaks[shift.first] - np.median(peaks[shift.before]) >= JUMP_BYTES and not is_first_real
        if is_jump and not _grows_on(group.lead, before, after):
            yield _Step(before, after)


def _grows_on(lead: Process, before: Rows, after: Rows) -> bool:
    """Whether memory grows steadily, so that a few counted steps between two readings only look like a jump.

    What it grows by afterwards is compared with the jump since the last low reading: those of counted steps tell, too.
    """
    (begin, first), end = (int(rows["step"][index]) for rows, index in ((before, -1), (after, 0))), int(after["step"][-1])
    known = lead.steps[slice(*np.searchsorted(lead.steps["step"], (begin, end + 1)))]
    known = known[known["allocated_peak_bytes"] > 0]
    steps, highest = known["step"], np.maximum.accumulate(known["allocated_peak_bytes"])
    index = int(np.searchsorted(steps, first))
    half = (np.median(before["allocated_peak_bytes"]) + after["allocated_peak_bytes"][0]) / 2
    low = max(0, int(np.searchsorted(highest[:index], half)) - 1)
    slope = float(highest[-1] - highest[index]) / max(1, int(steps[-1] - steps[index]))
    has_gap, jump = first - begin > 1, float(highest[index] - highest[low])
    return has_gap and slope * float(steps[index] - steps[low]) >= jump / 2


def _await_look(lead: Process, step: _Step) -> FoundLook | None:
    first = int(step.after["step"][0])
    return await_look(lead, PEAK, lambda look: look.first_step >= first, int(step.after["end_unix_ns"][-1]))


def _name_line(group: Group, begin_ns: int, look: Look | None) -> Text | None:
    """Return the line that allocates more than before in the step that begins at ``begin_ns``; None if it is unknown."""
    if look is None:
        return None
    earlier = _read_earlier_look(group.lead, begin_ns)
    growth = find_growth(look, earlier)
    if growth is None:
        return None
    template = (
        "{grown:bytes} more are allocated at {line}" if earlier is not None else "{grown:bytes} are allocated at {line}"
    )
    return Text(template, {"grown": growth.grown_bytes, "line": growth.line.text})


def _read_earlier_look(lead: Process, begin_ns: int) -> Look | None:
    return next((one for one in reversed(list(read_looks(lead, PEAK))) if one.end_ns <= begin_ns), None)


def _find_scale(lead: Process, begin_ns: int, look: Look | None) -> float | None:
    """Return how many times as large the blocks of the same lines are in the step that begins then; None if unknown."""
    earlier = _read_earlier_look(lead, begin_ns)
    return find_scale(look, earlier) if look is not None and earlier is not None else None


def _build_finding(group: Group, step: _Step, found: FoundLook) -> Finding:
    before, after = step
    medians = {
        column: (float(np.median(before[column])), float(np.median(after[column])))
        for column in ("allocated_peak_bytes", "rows", "tokens")
    }
    before_bytes, after_bytes = medians["allocated_peak_bytes"]
    forwards = read_forwards(group.lead, before), read_forwards(group.lead, after)
    if has_more_forwards(*forwards):
        kind = _FORWARDS
        cause = f"Steps have {format_count(round(forwards[1].number), 'forward')} instead of {forwards[0].number:.0f}"
    else:
        owner = name_owner(group, int(before["step"][-1]), int(after["step"][0]), found.known_ns).capitalize()
        between = _select_between(group.lead, before, after)
        kind, cause = _find_cause(owner, medians["rows"], medians["tokens"], between)
    if kind not in (_ROWS, _LENGTH, _FORWARDS) and (changed := _describe_training(group.lead, step, found.known_ns)):
        kind, cause = _TRAINING, changed
    lead, begin_ns = group.lead, int(after["begin_unix_ns"][0])
    if kind in (_KIND, _AFTER_PAUSE) and (scale := _find_scale(lead, begin_ns, found.look)) is not None:
        is_type = abs(scale - _WIDER_TYPE) < _WIDER_TYPE * _TYPE_SHARE
        kind, reason = (kind, "inputs are larger, or of a wider type") if is_type else (_LARGER, "inputs are larger")
        cause = f"The same lines allocate as many blocks, each {scale:.1f} times as large: {reason}"
    holder = _find_holder(lead, step, found.known_ns) if kind is _KIND and cause == _UNKNOWN else None
    advice = leak_holders.LeakAdvice("", "")
    if holder is not None:
        kind, cause = _HELD, leak_holders.describe_holder(holder).removesuffix(".")
        advice = leak_holders.advise_on_holder(holder)
    evidence = {"before_bytes": before_bytes, "after_bytes": after_bytes}
    for name in ("rows", "tokens"):
        if min(medians[name]) > 0:
            evidence |= {f"{name}_before": medians[name][0], f"{name}_after": medians[name][1]}
    kind = group.keep_saving_advice(kind, int(after["end_unix_ns"][-1]))
    device, micro_batch = group.lead.device_bytes, group.engine.micro_batch
    left = device - after_bytes if device else None
    lines = _name_line(group, begin_ns, found.look)
    earlier, first = int(before["step"][-1]), int(after["step"][0])
    is_exact = first - earlier <= 1
    since = f"from step {first} on" if is_exact else f"by step {first}"
    values = {"left": left, "cause": cause, "lines": lines, "micro_batch": micro_batch or ""}
    values |= {"since": since, "earlier": None if is_exact else earlier}
    values |= {"letting_go": advice.text, "clearing": advice.fix}
    return kind.at_steps(group, after, evidence, known_ns=found.known_ns, **values)


def _find_holder(lead: Process, step: _Step, known_ns: int) -> HeldTensors | None:
    """Return the variable that holds most of the rise, if blocks of no category had fewer bytes before; None without one."""
    counts = [event for event in lead.events_of(Tensors) if event.unclaimed_bytes is not None and event.unix_ns <= known_ns]
    begin_ns = int(step.before["end_unix_ns"][-1])
    earlier = next((event for event in reversed(counts) if event.unix_ns <= begin_ns), None)
    later = next((event for event in counts if event.unix_ns > begin_ns and event.held), None)
    if earlier is None or later is None:
        return None
    rise = int(np.median(step.after["allocated_peak_bytes"]) - np.median(step.before["allocated_peak_bytes"]))
    unclaimed = earlier.unclaimed_bytes or 0
    holder = leak_holders.choose_holder(later, rise + unclaimed)
    return holder if holder is not None and 2 * (holder.bytes - unclaimed) >= rise else None


def _describe_training(lead: Process, step: _Step, known_ns: int) -> str:
    """Return a sentence about what changed in the training at the rise; empty if nothing did."""
    off_ns = round(_STEPS_OFF * 1e9 * float(np.nanmedian(step.after["iteration_s"])))
    earliest_ns, latest_ns = int(step.before["end_unix_ns"][-1]) - off_ns, int(step.after["end_unix_ns"][0]) + off_ns
    found = lead.find_changes(earliest_ns, latest_ns, known_ns)
    text = describe_changes([change for change in found if change.effect >= 0])
    return f"{text[:1].upper()}{text[1:]}"


def _select_between(lead: Process, before: Rows, after: Rows) -> Rows:
    """Return the first step after the change and the counted steps before it: the change began in one of these."""
    steps = lead.steps
    low, high = np.searchsorted(steps["end_unix_ns"], (before["end_unix_ns"][-1], after["end_unix_ns"][0]), "right")
    between: Rows = steps[low:high]
    return between


def _find_cause(owner: str, rows: tuple[float, float], tokens: tuple[float, float], first: Rows) -> tuple[FindingKind, str]:
    if min(rows) > 0 and rows[1] > 1.05 * rows[0]:
        return _ROWS, f"{owner} steps have {format_count(round(rows[1]), 'row')} instead of {rows[0]:.0f}"
    if min(tokens) > 0 and tokens[1] > 1.05 * tokens[0]:
        if min(rows) <= 0:
            return _LENGTH, f"{owner} sequences are longer: {tokens[1]:.0f} tokens a step instead of {tokens[0]:.0f}"
        shapes = [f"{count:,.0f} x {total / count:,.0f}" for count, total in zip(rows, tokens, strict=True)]
        return _LENGTH, f"{owner} sequences are longer: {shapes[1]} tokens a step instead of {shapes[0]}"
    for column, name in (("eval_s", "An evaluation"), ("checkpoint_s", "A checkpoint")):
        if (first[column] > 0).any():
            return _AFTER_PAUSE, f"{name} came just before"
    return _KIND, _UNKNOWN
