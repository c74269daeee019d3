"""From some step on, training steps permanently need more device memory."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.causes.batch_causes import LENGTH, ROWS, has_more_forwards, name_owner, read_forwards
from zerotop.analysis.findings.support.gpu_use import measure_free_bytes
from zerotop.analysis.findings.support.links import Kinds, grew_with_leak, left_by_evaluation, took_more_for_growth
from zerotop.analysis.findings.support.memory import peak_rises
from zerotop.analysis.findings.support.memory.looks import FoundLook, await_look, find_growth, find_scale, read_looks
from zerotop.analysis.findings.support.memory.peak_rises import PeakRise, SharedRise
from zerotop.analysis.findings.support.memory.square_blocks import SquareBlocks, find_square_blocks
from zerotop.analysis.findings.support.memory.wider_types import ADVICE, describe_wider
from zerotop.analysis.formatting import Text, format_bytes, format_count
from zerotop.analysis.memory import leak_holders
from zerotop.analysis.memory.block_lines import Look
from zerotop.analysis.memory.tensor_inventory import AFTER_UPDATE, HeldTensors, read_held, read_pools
from zerotop.analysis.steps.training_changes import TrainingChange, describe_changes
from zerotop.recording.samples import Rows
from zerotop_probe.recording.event_values import AGAIN, PEAK
from zerotop_probe.recording.events import Tensors, TrainingChanged

_KIND = FindingKind(
    name="memory_step",
    severity=Severity.INFO,
    confidence=0.4,
    gpu_bytes="after_bytes - before_bytes",
    headline="Steps allocate up to {after_bytes:bytes} instead of {before_bytes:bytes} {since}",
    details=(
        "{cause}[; it began after step {earlier}][; {kept_bytes:bytes} instead of {kept_before:bytes} stay allocated after"
        " each step][; {others}][; {lines}]"
        "[; {side_bytes:bytes} are reserved for another stream than the training's][; {left:bytes} of the device are left]"
        "[; PyTorch leaves {unheld:bytes} of the device]."
    ),
    advice="See what stays allocated: trace a step with the microscope (x on the Memory screen).",
    explained_by=(Kinds(left_by_evaluation, "validation_jump"),),
    superseded_by=(Kinds(grew_with_leak, "memory_creep"), Kinds(took_more_for_growth, "batch_growth")),
)
_ROWS = _KIND.with_changes(confidence=0.9, advice=ROWS[0], fix=ROWS[1])
_LENGTH = _KIND.with_changes(confidence=0.9, advice=LENGTH[0])
_FORWARDS = _KIND.with_changes(confidence=0.85, advice="See which code calls the model more often in each step.")
_LARGER = _KIND.with_changes(
    confidence=0.7, advice="Cap the size of the inputs: the length of sequences, or the crop of images.", fix=""
)
_TRAINING = _KIND.with_changes(confidence=0.9, advice="", fix="")
_HELD = _KIND.with_changes(confidence=0.8, advice="{letting_go}", fix="{clearing}")
_GRAPH = _HELD.with_changes(confidence=0.85)
_SQUARE = _HELD.with_changes(confidence=0.9)
_WIDER = _HELD.with_changes(confidence=0.7)
_AFTER_PAUSE = _KIND.with_changes(confidence=0.5)
_OF_SOME = "Steps on {concerned:ranks} peak at {after_bytes:bytes} instead of {before_bytes:bytes} {since}"
_STEADY = "the peak of the other ranks is that of before"
_EVEN_OUT = "Give all ranks batches of the same size: in each step, the others wait for the one with the most work."
_UNKNOWN = "No other change was recorded"
# Blocks become so many times as large if elements are of 4 bytes instead of 2, but for this share.
_WIDER_TYPE, _TYPE_SHARE = 2.0, 0.1
# Counts of tensors after a step: of its graph, nothing is left then.
_AFTER_STEPS = (AFTER_UPDATE, AGAIN)
# By how many steps a change may be off.
_STEPS_OFF = 2


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each higher plateau, once for all ranks. That of the first real step has a finding of its own."""
    group = window.subject
    changes = peak_rises.find_shared(window)
    for change, found in window.follow(window.await_each(changes, _await_look), _explain_later):
        yield _build_finding(group, change, found)


def _explain_later(told: tuple[SharedRise, FoundLook]) -> tuple[SharedRise, FoundLook] | None:
    """Return the change with another cause that is known by now: the probe looks for those of the training now and then."""
    change, found = told
    process, step = change.rise.process, change.rise
    times = [event.unix_ns for event in process.events_of(TrainingChanged) if event.unix_ns > found.known_ns]
    text = _describe_training(step, found.known_ns)
    if not times or _describe_training(step, times[-1]) == text:
        return None
    known_ns = next(time_ns for time_ns in times if _describe_training(step, time_ns) != text)
    return change, found._replace(known_ns=known_ns)


def _await_look(change: SharedRise) -> FoundLook | None:
    _, first = change.rise.between
    return await_look(change.rise.process, PEAK, lambda look: look.first_step >= first, change.known_ns)


def _name_line(process: Process, begin_ns: int, look: Look | None) -> Text | None:
    """Return the line that allocates more than before in the step that begins at ``begin_ns``; None if it is unknown."""
    if look is None:
        return None
    earlier = _read_earlier_look(process, begin_ns)
    growth = find_growth(look, earlier)
    if growth is None:
        return None
    template = (
        "{grown:bytes} more are allocated at {line}" if earlier is not None else "{grown:bytes} are allocated at {line}"
    )
    return Text(template, {"grown": growth.grown_bytes, "line": growth.line.text})


def _read_earlier_look(process: Process, begin_ns: int) -> Look | None:
    return next((one for one in reversed(list(read_looks(process, PEAK))) if one.end_ns <= begin_ns), None)


def _find_scale(process: Process, begin_ns: int, look: Look | None) -> float | None:
    """Return how many times as large the blocks of the same lines are in the step that begins then; None if unknown."""
    earlier = _read_earlier_look(process, begin_ns)
    return find_scale(look, earlier) if look is not None and earlier is not None else None


def _build_finding(group: Group, change: SharedRise, found: FoundLook) -> Finding:
    step = change.rise
    process, before, after = step.process, step.before, step.after
    medians = {
        column: (float(np.median(before[column])), float(np.median(after[column])))
        for column in ("allocated_peak_bytes", "rows", "tokens")
    }
    before_bytes, after_bytes = medians["allocated_peak_bytes"]
    changed_step: int | None = None
    forwards = read_forwards(process, before), read_forwards(process, after)
    if has_more_forwards(*forwards):
        kind = _FORWARDS
        cause = f"Steps have {format_count(round(forwards[1].number), 'forward')} instead of {forwards[0].number:.0f}"
    else:
        owner = f"rank {process.rank}'s"
        if change.of_all or len(change.ranks) > 1:
            owner = name_owner(group, int(before["step"][-1]), int(after["step"][0]), found.known_ns)
        kind, cause = _find_cause(owner.capitalize(), medians["rows"], medians["tokens"], _select_between(step))
    if kind not in (_ROWS, _LENGTH, _FORWARDS) and (changed := _describe_training(step, found.known_ns)):
        kind, cause, changed_step = _TRAINING, changed, _find_changed_step(step, found.known_ns)
    begin_ns = int(after["begin_unix_ns"][0])
    if kind in (_KIND, _AFTER_PAUSE) and (scale := _find_scale(process, begin_ns, found.look)) is not None:
        is_type = abs(scale - _WIDER_TYPE) < _WIDER_TYPE * _TYPE_SHARE
        kind, reason = (kind, "inputs are larger, or of a wider type") if is_type else (_LARGER, "inputs are larger")
        cause = f"The same lines allocate as many blocks, each {scale:.1f} times as large: {reason}"
    advice = leak_holders.LeakAdvice("", "")
    square = _find_square(step) if kind is _KIND and cause == _UNKNOWN else None
    if square is not None:
        square = square.find_line(found.look)
        kind, blocks, advice = _SQUARE, str(square.text), leak_holders.LeakAdvice(square.advice, square.fix)
        cause = f"{blocks[:1].upper()}{blocks[1:]}"
    elif kind is _KIND and cause == _UNKNOWN:
        kind, cause, advice = _explain_kept(step, found.known_ns)
        if kind is _KIND and (wider := _describe_wider(step, found)) is not None:
            kind, cause, advice = _WIDER, str(wider), ADVICE
    evidence = {"before_bytes": before_bytes, "after_bytes": after_bytes, **_list_sizes(medians)}
    kind = _choose_advice(kind, group, change)
    if not change.of_all:
        kind = kind.with_changes(headline=_OF_SOME)
    device, micro_batch = process.device_bytes, group.engine.micro_batch
    taken_bytes = max(after_bytes, float(after["reserved_peak_bytes"].max()))
    unheld = device - taken_bytes if device else None
    free = measure_free_bytes(process, found.known_ns)
    # NVML may have been read before the rise only.
    left = min(free, unheld) if unheld is not None and isfinite(free) else None
    lines = _name_line(process, begin_ns, found.look)
    earlier, first = step.between
    if changed_step is not None:
        earlier, first = changed_step - 1, changed_step
    is_exact = first - earlier <= 1
    since = f"from step {first} on" if is_exact else f"by step {first}"
    values: dict[str, Any] = {"cause": cause, "lines": lines, "micro_batch": micro_batch or ""}
    values |= {"left": left, "unheld": unheld if left is None else None}
    values |= {"since": since, "earlier": None if is_exact else earlier}
    values |= {"others": _STEADY if change.others_steady else None, "concerned": change.ranks}
    values |= {"side_bytes": _measure_side_stream(step, found.known_ns)}
    values |= {"letting_go": advice.text, "clearing": advice.fix}
    kept_before, kept_bytes = step.held_bytes
    values |= {"kept_before": kept_before, "kept_bytes": kept_bytes}
    ranks = None if change.of_all else change.ranks
    return kind.at_steps(group, _select_after(step), evidence, known_ns=found.known_ns, ranks=ranks, **values)


def _list_sizes(medians: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Return the sizes of batches before and after, where they are known."""
    known = ((name, sizes) for name in ("rows", "tokens") if min(sizes := medians[name]) > 0)
    return {f"{name}_{when}": size for name, sizes in known for when, size in zip(("before", "after"), sizes, strict=True)}


def _choose_advice(kind: FindingKind, group: Group, change: SharedRise) -> FindingKind:
    """Return the kind with the advice that applies: memory is saved where it is short, and a graph always let go."""
    if kind in (_ROWS, _LENGTH) and change.others_steady and not group.has_stages:
        return kind.with_changes(advice=_EVEN_OUT, fix="")
    if kind in (_GRAPH, _SQUARE, _WIDER):
        return kind
    return group.keep_saving_advice(kind, int(change.rise.after["end_unix_ns"][-1]))


def _explain_kept(step: PeakRise, known_ns: int) -> tuple[FindingKind, str, leak_holders.LeakAdvice]:
    """Return the kind of finding, the cause and the advice for the variable that holds most of the rise, if it is known."""
    if (holder := _find_holder(step, known_ns)) is not None:
        return _HELD, leak_holders.describe_holder(holder).removesuffix("."), leak_holders.advise_on_holder(holder)
    if (graph := _find_graph(step, known_ns)) is None:
        return _KIND, _UNKNOWN, leak_holders.LeakAdvice("", "")
    kept = f"kept the graph that computed it, {format_bytes(graph.bytes)} in all, after step {graph.step}"
    cause = f"{graph.text[:1].upper()}{graph.text[1:]} {kept}"
    letting_go = (
        f"Call backward() without retain_graph=True; or delete {graph.name} at the end of each step, as the graph stays"
        " until the next forward has replaced it."
    )
    return _GRAPH, cause, leak_holders.LeakAdvice(letting_go, f"del {graph.name}")


def _list_counts(step: PeakRise, known_ns: int) -> list[Tensors]:
    counts = step.process.events_of(Tensors)
    return [event for event in counts if event.unclaimed_bytes is not None and event.unix_ns <= known_ns]


def _measure_side_stream(step: PeakRise, known_ns: int) -> int | None:
    """Return what is reserved for other streams than the one that trains, if most of the rise stays there; else None."""
    counts, begin_ns = _list_counts(step, known_ns), int(step.before["end_unix_ns"][-1])
    earlier = next((event for event in reversed(counts) if event.unix_ns <= begin_ns), None)
    later = next((event for event in counts if event.unix_ns > begin_ns and event.pools), None)
    if earlier is None or later is None:
        return None
    before, after = (
        [one for one in read_pools(event) if not (one.is_current or one.is_private)] for event in (earlier, later)
    )
    kept = sum(one.allocated for one in after) - sum(one.allocated for one in before)
    return sum(one.reserved for one in after) if 2 * kept >= step.grown_bytes else None


def _find_holder(step: PeakRise, known_ns: int) -> HeldTensors | None:
    """Return the variable that holds most of the rise, if blocks of no category had fewer bytes before; None without one."""
    counts = _list_counts(step, known_ns)
    begin_ns = int(step.before["end_unix_ns"][-1])
    earlier = next((event for event in reversed(counts) if event.unix_ns <= begin_ns), None)
    later = next((event for event in counts if event.unix_ns > begin_ns and event.held), None)
    if earlier is None or later is None:
        return None
    rise, unclaimed = int(step.grown_bytes), earlier.unclaimed_bytes or 0
    holder = leak_holders.choose_holder(later, rise + unclaimed)
    return holder if holder is not None and 2 * (holder.bytes - unclaimed) >= rise else None


def _describe_wider(step: PeakRise, found: FoundLook) -> Text | None:
    """Return which line allocates twice the bytes for the elements of a known tensor, in steps with as many rows."""
    before, after = (np.unique(rows["rows"][rows["rows"] > 0]) for rows in (step.before, step.after))
    begin_ns = int(step.before["end_unix_ns"][-1])
    counts = [event for event in _list_counts(step, found.known_ns) if event.held and event.unix_ns <= begin_ns]
    if not counts or len(before) != 1 or before.tolist() != after.tolist():
        return None
    held = [one for one in read_held(counts[-1]) if one.shape[:1] == tuple(before)]
    return describe_wider(held, _read_earlier_look(step.process, int(step.after["begin_unix_ns"][0])), found.look)


def _find_graph(step: PeakRise, known_ns: int) -> HeldTensors | None:
    """Return the local variable that has kept the graph of its tensor since the rise, most of it; None without one."""
    begin_ns = int(step.before["end_unix_ns"][-1])
    counts = [event for event in _list_counts(step, known_ns) if event.held and event.when in _AFTER_STEPS]
    earlier = next((event for event in reversed(counts) if event.unix_ns <= begin_ns), None)
    later = next((event for event in counts if event.unix_ns > begin_ns), None)
    if earlier is None or later is None:
        return None
    before = {one.text: one for one in read_held(earlier) if not one.keeps_graph}
    kept = [
        one
        for one in read_held(later)
        if one.keeps_graph and one.text in before and one.name.isidentifier() and one.count == before[one.text].count
    ]
    largest = max(kept, key=lambda one: one.bytes, default=None)
    return largest if largest is not None and 2 * (largest.bytes - before[largest.text].bytes) >= step.grown_bytes else None


def _find_square(step: PeakRise) -> SquareBlocks | None:
    """Return the blocks of rows x rows elements that the rise consists of; None if it does not."""
    return find_square_blocks(step.process, int(step.before["end_unix_ns"][-1]), step.after[0], step.grown_bytes)


def _select_after(step: PeakRise) -> Rows:
    """Return the steps from the first one after the rise on."""
    if step.kept is None and step.between[1] >= step.after["step"][0]:
        return step.after
    steps = step.process.steps
    rows: Rows = steps[slice(*np.searchsorted(steps["step"], (step.between[1], int(step.after["step"][-1]) + 1)))]
    return rows


def _describe_training(step: PeakRise, known_ns: int) -> str:
    """Return a sentence about what changed in the training at the rise; empty if nothing did."""
    text = describe_changes(_find_changes(step, known_ns))
    return f"{text[:1].upper()}{text[1:]}"


def _find_changes(step: PeakRise, known_ns: int) -> list[TrainingChange]:
    """Return what changed in the training at the rise, and does not make steps smaller."""
    off_ns = round(_STEPS_OFF * 1e9 * float(np.nanmedian(step.after["iteration_s"])))
    latest_ns, steps = int(step.after["end_unix_ns"][0]) + off_ns, step.process.steps
    last = int(np.searchsorted(steps["step"], step.between[0], "right")) - 1
    earliest_ns = min(int(step.before["end_unix_ns"][-1]), int(steps["end_unix_ns"][last])) - off_ns
    found = step.process.find_changes(earliest_ns, latest_ns, known_ns)
    return [change for change in found if change.effect >= 0]


def _find_changed_step(step: PeakRise, known_ns: int) -> int | None:
    """Return the step since when the training is as after the rise, if its settings were looked at in the step before."""
    begin, end = step.between
    looks = {
        tuple(step.process.step_at(time_ns) or 0 for time_ns in (change.begin_ns, change.end_ns))
        for change in _find_changes(step, known_ns)
    }
    if len(looks) != 1:
        return None
    ((before, after),) = looks
    return after if after - before <= 1 and begin < after <= end else None


def _select_between(step: PeakRise) -> Rows:
    """Return the first step after the change and the counted steps before it: the change began in one of these."""
    steps, ends_ns = step.process.steps, (step.before["end_unix_ns"][-1], step.after["end_unix_ns"][0])
    low, high = np.searchsorted(steps["end_unix_ns"], ends_ns, "right")
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
