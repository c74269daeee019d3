"""Evaluation holds more memory than training did, and part of it stays reserved.

Read from the allocator at the begin and the end of each evaluation, and the shapes of its micro-batches. The script's
variables still have the last micro-batch's outputs at that end: what stays is told once the next step has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.links import Kinds, is_simultaneous
from zerotop.analysis.findings.support.memory import evaluation_batches, evaluation_keepers
from zerotop.analysis.findings.support.thresholds import JUMP_BYTES, USED_SHARE
from zerotop.recording.samples import Samples
from zerotop_probe.recording.tables import END, FAILED, PHASE_CODE

_KIND = FindingKind(
    name="validation_jump",
    severity=Severity.INFO,
    confidence=0.7,
    gpu_bytes="added_bytes",
    headline="Evaluation raised reserved memory by {added_bytes:bytes} to {reserved_bytes:bytes}",
    details=(
        "It took {evaluation_s:seconds}"
        f"{evaluation_batches.BATCHES}"
        "[; it allocated only {own_peak:bytes}, training {training_peak:bytes}, but in blocks of other sizes]"
        "[; {kept:bytes} stay reserved afterwards]{released}[, {left:bytes} of them in tensors that outlived the next step]"
        "[, and tensors of {more_left:bytes} outlived the next step]"
        "[, which leaves {unclaimed:bytes} of the device to training]."
    ),
    advice="{eval_outputs}",
    fix="{eval_outputs_fix}",
    explained_by=(Kinds(is_simultaneous, "unused_graphs"),),
)
_KEPT = _KIND.with_changes(
    severity=Severity.WARNING,
    confidence=0.9,
    gpu_bytes="outlived_bytes",
    headline="Evaluation leaves tensors of {outlived_bytes:bytes} allocated[: {keeper} keeps them]",
    details=(
        "They outlived the next step; before, steps needed up to {training_peak_bytes:bytes} in all.[ {held_by}]"
        "[ {enabled}][ In the evaluation most samples are at {line}.]"
        " Reserved memory rose by {added_bytes:bytes} to {reserved_bytes:bytes}"
        "[, which leaves {unclaimed:bytes} of the device to training]."
    ),
)
_TENSORS_ADVICE, _TENSORS_FIX = "{eval_tensors}", "{eval_tensors_fix}"
# Share by which evaluation has to raise the reserved memory, beside JUMP_BYTES.
JUMP_SHARE = 0.05
# From so large a part of training's own peak on, tensors that an evaluation leaves are worth a warning.
_KEPT_SHARE = 0.5
_NEXT_NS = 600 * 10**9  # after and before an evaluation, in which the end of a step is searched
# Share of a device at which the next allocation may fail: the largest single ones of the recorded runs took 3 %.
EDGE_SHARE = 0.95


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each evaluation that reserves more memory than before; later ones use the same memory."""
    lead = window.subject.lead
    evaluations, records = lead.read_rare_phases("eval"), lead.records("allocator")
    jumps: list[_Jump] = []
    kept: list[tuple[_Jump, int, int]] = []
    begins, ends = lead.compute_begins(evaluations).tolist(), evaluations.times.tolist()
    for index in range(len(ends))[window.steps(evaluations.rows)]:
        begin_ns, end_ns, span = begins[index], ends[index], evaluations.rows[index]
        earlier = records.read_window(ends[index - 1] if index else 0, begin_ns)
        during = records.read_window(begin_ns, end_ns)
        peaks = np.max(window.results([_find_peaks(earlier)], None), axis=0).tolist()
        window.results([_find_peaks(during)], None)
        memory = _measure_memory(lead, records.read_last(begin_ns), during, *peaks)
        if memory is not None and not span["flags"] & FAILED:
            jumps.append(_Jump(begin_ns, end_ns, int(span["step"]), memory))
            yield _build_finding(window.subject, jumps[-1])
    for jump, (known_ns, left) in window.await_each(jumps, partial(_measure_outliving, lead)):
        yield _build_finding(window.subject, jump, known_ns, left if left > JUMP_BYTES else 0)
        if _is_much(jump, left):
            kept.append((jump, known_ns, left))
    for (jump, known_ns, left), keeper in window.await_each(kept, partial(_find_keeper, lead), "keepers"):
        yield _build_finding(window.subject, jump, max(known_ns, keeper.known_ns), left, keeper)


class _Jump(NamedTuple):
    """An evaluation that raised the reserved memory, and the allocator's bytes."""

    begin_ns: int
    end_ns: int
    step: int
    memory: dict[str, float]


def _measure_outliving(lead: Process, jump: _Jump) -> tuple[int, int] | None:
    """Return when the next step's end was read, and the bytes that evaluation left and that were there then.

    None without such a step: the last reading of a process that ends in the evaluation is that of a step, too.
    """
    if not len(lead.steps) or int(lead.steps["end_unix_ns"][-1]) <= jump.end_ns:
        return None
    after = _read_level(lead.records("allocator").read_window(jump.end_ns, jump.end_ns + _NEXT_NS), 0)
    if after is None:
        return None
    before = _read_level(lead.records("allocator").read_window(jump.begin_ns - _NEXT_NS, jump.begin_ns), -1)
    grown = after[1] - before[1] if before is not None else 0
    return after[0], min(int(jump.memory["left_allocated_bytes"]), grown)


def _is_much(jump: _Jump, left: int) -> bool:
    return left > max(JUMP_BYTES, _KEPT_SHARE * jump.memory.get("training_peak_bytes", np.inf))


def _find_keeper(lead: Process, kept: tuple[_Jump, int, int]) -> evaluation_keepers.Keeper | None:
    jump, _, left = kept
    return evaluation_keepers.find_keeper(lead, jump.begin_ns, jump.end_ns, left)


def _read_level(samples: Samples, place: int) -> tuple[int, int] | None:
    """Return the time and the allocated bytes of one of the readings after steps, the first or the last."""
    if not len(samples):
        return None
    is_level = (samples.rows["edge"] == END) & (samples.rows["phase"] == PHASE_CODE["step"])
    levels = samples.rows["allocated_bytes"][is_level]
    return (int(samples.times[is_level][place]), int(levels[place])) if len(levels) else None


def _find_peaks(samples: Samples) -> tuple[int, int]:
    """Return the highest reserved bytes, and the highest allocated ones outside evaluations; -1 where there are none."""
    if not len(samples):
        return -1, -1
    training = samples.rows["allocated_peak_bytes"][samples.rows["phase"] != PHASE_CODE["eval"]]
    return int(samples.rows["reserved_bytes"].max()), int(training.max(initial=-1))


def _measure_memory(
    lead: Process, before: Any, during: Samples, reserved_before: int, training_peak: int
) -> dict[str, float] | None:
    """Return the allocator's bytes before and after; None if evaluation did not raise them, or they are unknown."""
    if before is None or not len(during):
        return None
    begin, peak = int(before["reserved_bytes"]), int(during.rows["reserved_bytes"].max())
    if peak - reserved_before < max(JUMP_BYTES, JUMP_SHARE * reserved_before):
        return None
    sizes = {
        "reserved_before_bytes": begin,
        "reserved_bytes": peak,
        "added_bytes": peak - begin,
        "kept_bytes": max(0, int(during.rows["reserved_bytes"][-1]) - begin),
        "left_allocated_bytes": _measure_left_bytes(lead, int(before["allocated_bytes"]), during),
    }
    if lead.has_exact_peaks:
        sizes["training_peak_bytes"] = training_peak
        sizes["evaluation_peak_bytes"] = int(during.rows["allocated_peak_bytes"].max())
    if lead.device_bytes:
        sizes["device_bytes"] = lead.device_bytes
    return {name: float(size) for name, size in sizes.items()}


def _measure_left_bytes(lead: Process, before: int, during: Samples) -> int:
    """Return the bytes of tensors that evaluation left alive, without parameters that stage 3 still keeps gathered."""
    left = int(during.rows["allocated_bytes"][-1]) - before
    parameters = lead.engine.parameters
    gathered = 2 * parameters if lead.engine.zero_stage == 3 and isinstance(parameters, int) else 0
    return max(0, left - gathered)


def _build_finding(
    group: Group, jump: _Jump, known_ns: int | None = None, left: int = 0, keeper: evaluation_keepers.Keeper | None = None
) -> Finding:
    """Return the finding; ``left``: bytes of tensors that outlived the next step, whose end is known since ``known_ns``."""
    begin_ns, end_ns, step, memory = jump
    shapes = evaluation_batches.measure_batches(group.lead, begin_ns, end_ns)
    is_larger = evaluation_batches.is_batch_larger(shapes)
    kept, device = memory["kept_bytes"], memory.get("device_bytes")
    own_peak, training_peak = memory.get("evaluation_peak_bytes"), memory.get("training_peak_bytes")
    has_step = known_ns is not None
    has_lower_peak = own_peak is not None and training_peak is not None and own_peak <= training_peak
    held = memory["reserved_before_bytes"] + kept
    told: dict[str, Any] = {}
    if _is_much(jump, left):
        told = evaluation_keepers.describe_keeper(group.lead, begin_ns, end_ns, known_ns or end_ns, keeper)
    is_near_edge = device is not None and held > EDGE_SHARE * device
    kind = _KIND.with_changes(
        severity=Severity.WARNING if is_near_edge else Severity.INFO,
        confidence=0.95 if is_larger else 0.7,
    )
    if told:
        kind, memory = _KEPT.with_changes(advice=told.pop("advice"), fix=told.pop("fix")), {**memory, "outlived_bytes": left}
    elif device is not None and held < USED_SHARE * device:
        kind = kind.with_changes(advice="", fix="")
    elif left > JUMP_BYTES:
        kind = kind.with_changes(advice=_TENSORS_ADVICE, fix=_TENSORS_FIX)
    elif is_larger:
        kind = kind.with_changes(advice=evaluation_batches.BATCH_ADVICE, fix=evaluation_batches.BATCH_FIX)
    return kind.at(
        group,
        begin_ns,
        end_ns,
        {**memory, **shapes, "evaluation_s": (end_ns - begin_ns) / 1e9},
        known_ns=known_ns,
        step=step,
        **evaluation_batches.describe_batches(shapes),
        **told,
        own_peak=own_peak if has_lower_peak else None,
        training_peak=training_peak if has_lower_peak else None,
        kept=kept if has_step and kept else None,
        released="; all of it was released" if has_step and not kept else "",
        left=left if 0 < left <= kept else None,
        more_left=left if left > kept else None,
        unclaimed=device - held if has_step and device is not None else None,
    )
