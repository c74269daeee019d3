"""Evaluation holds more memory than training did, and what it leaves behind.

Read from the allocator at the begin and the end of each evaluation, and the shapes of its micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Facts, Process, Rows, Samples
from zerotop.analysis.annotations.support.thresholds import EDGE_SHARE, JUMP_BYTES, JUMP_SHARE
from zerotop.analysis.formatting import seconds, size
from zerotop_probe.recording.tables import EVAL, FAILED, PHASE_CODE


@dataclass
class _Seen:
    """Up to when the lead's allocator was read, and the most that it held; of how many evaluations was told."""

    upto_ns: int = 0
    reserved: int = -1
    training_peak: int = -1
    evaluations: int = 0

    def take(self, lead: Process, end_ns: int) -> Samples:
        """Reads on."""
        samples = lead.allocator.within(self.upto_ns, end_ns)
        self.upto_ns = max(self.upto_ns, end_ns)
        if len(samples):
            self.reserved = max(self.reserved, int(samples.rows["reserved_bytes"].max()))
            training = samples.rows["allocated_peak_bytes"][samples.rows["phase"] != PHASE_CODE["eval"]]
            self.training_peak = max([self.training_peak, *training.max(initial=-1, keepdims=True).tolist()])
        return samples


def detect(facts: Facts) -> Iterator[Annotation]:
    """One finding for each evaluation that takes memory higher than it has been; later ones live in what is held."""
    for group in facts.groups:
        seen, lead = group.kept(_Seen), group.lead
        evaluations = lead.rare("eval")
        new = Samples(evaluations.times[seen.evaluations :], evaluations.rows[seen.evaluations :])
        seen.evaluations = len(evaluations)
        for begin_ns, end_ns, span in zip(lead.begins_ns(new).tolist(), new.times.tolist(), new.rows, strict=True):
            memory = _memory(lead, begin_ns, end_ns, seen)
            if memory is not None and not span["flags"] & FAILED:
                shapes = _shapes(lead, begin_ns, end_ns)
                duration = {"evaluation_s": (end_ns - begin_ns) / 1e9}
                step, ranks = int(span["step"]), group.ranks(end_ns)
                yield _annotation((begin_ns, end_ns), step, ranks, memory | shapes | duration)
        if len(lead.steps):
            # While an evaluation is in progress no step is finished.
            seen.take(lead, int(lead.steps["end_unix_ns"][-1]))


def _memory(lead: Process, begin_ns: int, end_ns: int, seen: _Seen) -> dict[str, float] | None:
    """What the allocator held before and after; None where evaluation did not raise it, or nobody knows."""
    seen.take(lead, begin_ns)
    before, held_most, training_peak = lead.allocator.last(begin_ns), seen.reserved, seen.training_peak
    during = seen.take(lead, end_ns)
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
        "left_allocated_bytes": _left(lead, int(before["allocated_bytes"]), during),
    }
    if lead.exact_peaks:
        found["training_peak_bytes"] = training_peak
        found["evaluation_peak_bytes"] = int(during.rows["allocated_peak_bytes"].max())
    if lead.device_bytes:
        found["device_bytes"] = lead.device_bytes
    return {name: float(value) for name, value in found.items()}


def _left(lead: Process, before: int, during: Samples) -> int:
    """Bytes in tensors that evaluation left alive. Stage 3 keeps parameters that it gathered, until training goes on."""
    left = int(during.rows["allocated_bytes"][-1]) - before
    parameters = lead.engine.get("parameters")
    gathered = 2 * parameters if lead.engine.get("zero_stage") == 3 and isinstance(parameters, int) else 0
    return max(0, left - gathered)


def _shapes(lead: Process, begin_ns: int, end_ns: int) -> dict[str, float]:
    """Micro-batches of the evaluation and of the training before it; nothing where they are not known."""
    mine = lead.phase(begin_ns, end_ns, "forward")
    before = lead.steps_until(begin_ns)[-10:]
    if not len(mine) or not len(before):
        return {}
    training = lead.phase(int(before["begin_unix_ns"][0]), begin_ns, "forward")
    mine, training = mine.where(mine.rows["flags"] & EVAL != 0), training.where(training.rows["flags"] & EVAL == 0)
    if not len(mine) or not len(training):
        return {}
    widest, usual = _largest(mine), _largest(Samples(training.times[-10:], training.rows[-10:]))
    if min(widest["rows"], usual["rows"]) <= 0:
        return {}
    found = {"rows": float(widest["rows"]), "training_rows": float(usual["rows"])}
    found["rows_ratio"] = found["rows"] / found["training_rows"]
    if min(widest["sequence"], usual["sequence"]) > 0:
        found |= {"sequence": float(widest["sequence"]), "training_sequence": float(usual["sequence"])}
        found["tokens_ratio"] = float(widest["tokens"] / usual["tokens"]) if usual["tokens"] > 0 else found["rows_ratio"]
    return found


def _largest(forwards: Samples) -> Rows:
    size_of = np.where(forwards.rows["tokens"] > 0, forwards.rows["tokens"], forwards.rows["rows"])
    largest: Rows = forwards.rows[int(np.argmax(size_of))]
    return largest


def _annotation(when: tuple[int, int], step: int, ranks: tuple[int, ...], seen: dict[str, float]) -> Annotation:
    device = seen.get("device_bytes")
    edge = device is not None and seen["reserved_before_bytes"] + seen["kept_bytes"] > EDGE_SHARE * device
    larger = seen.get("tokens_ratio", seen.get("rows_ratio", 0.0)) > 1.05
    return Annotation(
        name="validation_jump",
        begin_ns=when[0],
        end_ns=when[1],
        known_ns=when[1],
        step=step,
        ranks=ranks,
        severity=Severity.WARNING if edge or seen["left_allocated_bytes"] > JUMP_BYTES else Severity.INFO,
        confidence=0.95 if larger else 0.7,
        sentence=_sentence(seen),
        advice=_advice(seen, larger),
        evidence=seen,
    )


def _sentence(seen: dict[str, float]) -> str:
    text = (
        f"Evaluation raised what PyTorch holds by {size(seen['added_bytes'])} to {size(seen['reserved_bytes'])}"
        f" in {seconds(seen['evaluation_s'])}"
    )
    if "sequence" in seen:
        text += f": its micro-batch is {seen['rows']:.0f} x {seen['sequence']:.0f} tokens, {seen['tokens_ratio']:.1f} times"
        text += f" training's {seen['training_rows']:.0f} x {seen['training_sequence']:.0f}"
    elif "rows" in seen:
        text += f": its micro-batch has {seen['rows']:.0f} rows, training's {seen['training_rows']:.0f}"
    if seen.get("evaluation_peak_bytes", np.inf) <= seen.get("training_peak_bytes", 0.0):
        text += f"; it used only {size(seen['evaluation_peak_bytes'])} at once, training"
        text += f" {size(seen['training_peak_bytes'])}, but its blocks are of other sizes"
    text += f"; {size(seen['kept_bytes'])} stay held afterwards" if seen["kept_bytes"] else "; all of it was given back"
    if seen["left_allocated_bytes"] > JUMP_BYTES:
        text += f", {size(seen['left_allocated_bytes'])} of them in tensors that are still alive"
    if device := seen.get("device_bytes"):
        held = seen["reserved_before_bytes"] + seen["kept_bytes"]
        text += f", so that training goes on with {size(device - held)} of the device unclaimed"
    return text + "."


def _advice(seen: dict[str, float], larger: bool) -> str:
    if seen["left_allocated_bytes"] > JUMP_BYTES:
        return (
            "Keep less of the evaluation: Trainer's prediction_loss_only=True, or eval_accumulation_steps=1, so that logits"
            " move to the host as they come."
        )
    if larger:
        return (
            f"Set Trainer's per_device_eval_batch_size to {seen['training_rows']:.0f}, as in training: evaluation then fits"
            " in what training holds."
        )
    return "Set Trainer's prediction_loss_only=True or eval_accumulation_steps=1, so that logits do not pile up on the GPU."
