"""Evaluation holds more memory than training did, and what it leaves behind.

Read from the allocator at the begin and the end of each evaluation, and the shapes of its micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Process, Rows, Samples
from zerotop.analysis.annotations.support.thresholds import EDGE_SHARE, JUMP_BYTES, JUMP_SHARE
from zerotop.analysis.formatting import format_bytes, format_seconds
from zerotop_probe.recording.tables import EVAL, FAILED, PHASE_CODE


@dataclass
class _State:
    """Up to when the lead's allocator was read, and the most that it held; of how many evaluations was told."""

    until_ns: int = 0
    reserved_peak: int = -1
    training_peak: int = -1
    evaluations_read: int = 0

    def read_samples(self, lead: Process, end_ns: int) -> Samples:
        """Reads on."""
        samples = lead.allocator.read_window(self.until_ns, end_ns)
        self.until_ns = max(self.until_ns, end_ns)
        if len(samples):
            self.reserved_peak = max(self.reserved_peak, int(samples.rows["reserved_bytes"].max()))
            training = samples.rows["allocated_peak_bytes"][samples.rows["phase"] != PHASE_CODE["eval"]]
            self.training_peak = max([self.training_peak, *training.max(initial=-1, keepdims=True).tolist()])
        return samples


def detect(facts: Evidence) -> Iterator[Annotation]:
    """One finding for each evaluation that takes memory higher than it has been; later ones live in what is held."""
    for group in facts.groups:
        seen, lead = group.get_state(_State), group.lead
        evaluations = lead.read_rare_phases("eval")
        new = Samples(evaluations.times[seen.evaluations_read :], evaluations.rows[seen.evaluations_read :])
        seen.evaluations_read = len(evaluations)
        for begin_ns, end_ns, span in zip(lead.compute_begins(new).tolist(), new.times.tolist(), new.rows, strict=True):
            memory = _measure_memory(lead, begin_ns, end_ns, seen)
            if memory is not None and not span["flags"] & FAILED:
                shapes = _measure_shapes(lead, begin_ns, end_ns)
                duration = {"evaluation_s": (end_ns - begin_ns) / 1e9}
                step, ranks = int(span["step"]), group.ranks_at(end_ns)
                yield _build_finding((begin_ns, end_ns), step, ranks, memory | shapes | duration)
        if len(lead.steps):
            # While an evaluation is in progress no step is finished.
            seen.read_samples(lead, int(lead.steps["end_unix_ns"][-1]))


def _measure_memory(lead: Process, begin_ns: int, end_ns: int, state: _State) -> dict[str, float] | None:
    """What the allocator held before and after; None where evaluation did not raise it, or nobody knows."""
    state.read_samples(lead, begin_ns)
    before, held_most, training_peak = lead.allocator.read_last(begin_ns), state.reserved_peak, state.training_peak
    during = state.read_samples(lead, end_ns)
    if before is None or not len(during):
        return None
    held, holds = int(before["reserved_bytes"]), int(during.rows["reserved_bytes"].max())
    if holds - held_most < max(JUMP_BYTES, JUMP_SHARE * held_most):
        return None
    found = {
        "reserved_before_bytes": held,
        "reserved_bytes": holds,
        "added_bytes": holds - held,
        "kept_bytes": max(0, int(during.rows["reserved_bytes"][-1]) - held),
        "left_allocated_bytes": _measure_left_bytes(lead, int(before["allocated_bytes"]), during),
    }
    if lead.has_exact_peaks:
        found["training_peak_bytes"] = training_peak
        found["evaluation_peak_bytes"] = int(during.rows["allocated_peak_bytes"].max())
    if lead.device_bytes:
        found["device_bytes"] = lead.device_bytes
    return {name: float(value) for name, value in found.items()}


def _measure_left_bytes(lead: Process, before: int, during: Samples) -> int:
    """Bytes in tensors that evaluation left alive. Stage 3 keeps parameters that it gathered, until training goes on."""
    left = int(during.rows["allocated_bytes"][-1]) - before
    parameters = lead.engine.get("parameters")
    gathered = 2 * parameters if lead.engine.get("zero_stage") == 3 and isinstance(parameters, int) else 0
    return max(0, left - gathered)


def _measure_shapes(lead: Process, begin_ns: int, end_ns: int) -> dict[str, float]:
    """Micro-batches of the evaluation and of the training before it; nothing where they are not known."""
    mine = lead.read_phases(begin_ns, end_ns, "forward")
    before = lead.steps_until(begin_ns)[-10:]
    if not len(mine) or not len(before):
        return {}
    training = lead.read_phases(int(before["begin_unix_ns"][0]), begin_ns, "forward")
    mine, training = (
        mine.select_rows(mine.rows["flags"] & EVAL != 0),
        training.select_rows(training.rows["flags"] & EVAL == 0),
    )
    if not len(mine) or not len(training):
        return {}
    widest, usual = _find_largest(mine), _find_largest(Samples(training.times[-10:], training.rows[-10:]))
    if min(widest["rows"], usual["rows"]) <= 0:
        return {}
    found = {"rows": float(widest["rows"]), "training_rows": float(usual["rows"])}
    found["rows_ratio"] = found["rows"] / found["training_rows"]
    if min(widest["sequence"], usual["sequence"]) > 0:
        found |= {"sequence": float(widest["sequence"]), "training_sequence": float(usual["sequence"])}
        found["tokens_ratio"] = float(widest["tokens"] / usual["tokens"]) if usual["tokens"] > 0 else found["rows_ratio"]
    return found


def _find_largest(forwards: Samples) -> Rows:
    size_of = np.where(forwards.rows["tokens"] > 0, forwards.rows["tokens"], forwards.rows["rows"])
    largest: Rows = forwards.rows[int(np.argmax(size_of))]
    return largest


def _build_finding(when: tuple[int, int], step: int, ranks: tuple[int, ...], evidence: dict[str, float]) -> Annotation:
    device = evidence.get("device_bytes")
    edge = device is not None and evidence["reserved_before_bytes"] + evidence["kept_bytes"] > EDGE_SHARE * device
    larger = evidence.get("tokens_ratio", evidence.get("rows_ratio", 0.0)) > 1.05
    return Annotation(
        name="validation_jump",
        begin_ns=when[0],
        end_ns=when[1],
        known_ns=when[1],
        step=step,
        ranks=ranks,
        severity=Severity.WARNING if edge or evidence["left_allocated_bytes"] > JUMP_BYTES else Severity.INFO,
        confidence=0.95 if larger else 0.7,
        sentence=_describe_finding(evidence),
        advice=_choose_advice(evidence, larger),
        evidence=evidence,
    )


def _describe_finding(evidence: dict[str, float]) -> str:
    text = (
        f"Evaluation raised what PyTorch holds by {format_bytes(evidence['added_bytes'])} to {format_bytes(evidence['reserved_bytes'])}"
        f" in {format_seconds(evidence['evaluation_s'])}"
    )
    if "sequence" in evidence:
        text += f": its micro-batch is {evidence['rows']:.0f} x {evidence['sequence']:.0f} tokens, {evidence['tokens_ratio']:.1f} times"
        text += f" training's {evidence['training_rows']:.0f} x {evidence['training_sequence']:.0f}"
    elif "rows" in evidence:
        text += f": its micro-batch has {evidence['rows']:.0f} rows, training's {evidence['training_rows']:.0f}"
    if evidence.get("evaluation_peak_bytes", np.inf) <= evidence.get("training_peak_bytes", 0.0):
        text += f"; it used only {format_bytes(evidence['evaluation_peak_bytes'])} at once, training"
        text += f" {format_bytes(evidence['training_peak_bytes'])}, but its blocks are of other sizes"
    text += (
        f"; {format_bytes(evidence['kept_bytes'])} stay held afterwards"
        if evidence["kept_bytes"]
        else "; all of it was given back"
    )
    if evidence["left_allocated_bytes"] > JUMP_BYTES:
        text += f", {format_bytes(evidence['left_allocated_bytes'])} of them in tensors that are still alive"
    if device := evidence.get("device_bytes"):
        held = evidence["reserved_before_bytes"] + evidence["kept_bytes"]
        text += f", so that training goes on with {format_bytes(device - held)} of the device unclaimed"
    return text + "."


def _choose_advice(evidence: dict[str, float], larger: bool) -> str:
    if evidence["left_allocated_bytes"] > JUMP_BYTES:
        return (
            "Keep less of the evaluation: Trainer's prediction_loss_only=True, or eval_accumulation_steps=1, so that logits"
            " move to the host as they come."
        )
    if larger:
        return (
            f"Set Trainer's per_device_eval_batch_size to {evidence['training_rows']:.0f}, as in training: evaluation then fits"
            " in what training holds."
        )
    return "Set Trainer's prediction_loss_only=True or eval_accumulation_steps=1, so that logits do not pile up on the GPU."
