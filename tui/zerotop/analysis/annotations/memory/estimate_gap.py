"""What DeepSpeed's estimator says of this stage and offload, beside what the GPU had to hold, and which row differs most.

Read from the ledger at the highest peak, once PLATEAU_STEPS real steps after the first one have shown it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, Severity, build_step_finding
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Rows
from zerotop.analysis.annotations.support.fp16_warmup import count_skipped_first
from zerotop.analysis.annotations.support.thresholds import GAP_BYTES, GAP_SHARE, PLATEAU_STEPS
from zerotop.analysis.formatting import format_bytes
from zerotop.analysis.memory.deepspeed_estimates import Estimate
from zerotop.analysis.memory.ledger_rows import ACTIVATIONS, CUBLAS, OUTSIDE, UNALLOCATED, UNATTRIBUTED, UNEXPLAINED
from zerotop.analysis.memory.peak_ledger import PeakLedger, read_peak_ledgers
from zerotop.analysis.memory.zero_model import estimate_job, is_for_setup, parse_setup

# What the estimator is about; the other rows are in no formula of it.
_MODEL_STATES = ("parameters", "gradients", "master_weights", "optimizer_state", "buffers")
_LEDGER_ROWS = {
    "model states": _MODEL_STATES,
    "activations and temporaries": (ACTIVATIONS, UNATTRIBUTED, UNEXPLAINED),
    "reserved but unallocated": (UNALLOCATED,),
    "context, NCCL and cuBLAS": (OUTSIDE, CUBLAS),
}


@dataclass
class _State:
    """Whether an attempt was looked at."""

    is_checked: bool = False


def detect(facts: Evidence) -> Iterator[Annotation]:
    """At most one finding for each attempt."""
    for group in facts.groups:
        first = count_skipped_first(group.lead)
        steps = group.lead.steps[first + 1 : first + 1000]
        real = np.flatnonzero(~steps["skipped"])[:PLATEAU_STEPS]
        if not group.get_state(_State).is_checked and len(real) == PLATEAU_STEPS:
            group.get_state(_State).is_checked = True
            yield from _check_group(facts, group, steps[real])


def _check_group(facts: Evidence, group: Group, rows: Rows) -> Iterator[Annotation]:
    known_ns, job = int(rows["end_unix_ns"][-1]), parse_setup(group.lead.engine)
    said = [one for one in estimate_job(job) if is_for_setup(one, job)] if job is not None else []
    gpu = group.lead.gpu_key
    peaks = read_peak_ledgers(facts.session, known_ns, [gpu]) if gpu is not None else ()
    found = [one for one in peaks if group.lead.rank in one.ledger.ranks]
    if not said or not found:
        return
    # Of rows that differ only in how the model was made, which is not known, GPUs get the same.
    estimate, peak = said[0], found[0]
    sizes = {name: peak.ledger.sum_bytes(*keys) / len(peak.ledger.ranks) for name, keys in _LEDGER_ROWS.items()}
    gap = sum(sizes.values()) - estimate.gpu_bytes
    if abs(gap) >= max(GAP_BYTES, GAP_SHARE * estimate.gpu_bytes):
        yield _build_finding(group, rows, estimate, peak, sizes)


def _build_finding(group: Group, rows: Rows, estimate: Estimate, peak: PeakLedger, sizes: dict[str, float]) -> Annotation:
    total, states = sum(sizes.values()), sizes["model states"]
    beyond = {name: count for name, count in sizes.items() if name != "model states"}
    differences = beyond | {"model states": states - estimate.gpu_bytes}
    most = max(differences, key=lambda name: abs(differences[name]))
    making = peak.peak.phase == "init"
    entered = ", of all since it was entered" if peak.before is not None else ""
    parts = ", ".join(f"{format_bytes(count)} {name}" for name, count in beyond.items())
    return build_step_finding(
        rows,
        name="estimate_gap",
        ranks=group.ranks_at(int(rows["end_unix_ns"][-1])),
        severity=Severity.INFO,
        confidence=0.9,
        sentence=(
            f"DeepSpeed's estimator says {format_bytes(estimate.gpu_bytes)} a GPU for stage {estimate.stage} with"
            f" {estimate.option_text}; at the peak, {peak.peak.place_text}{entered}, this one held {format_bytes(total)}: {format_bytes(states)} of"
            f" model states and, which no estimate counts, {parts}. {most[0].upper()}{most[1:]} make most of the difference"
            f" ({format_bytes(abs(differences[most]))} {'more' if differences[most] > 0 else 'less'})."
        ),
        advice=_INIT_ADVICE if making else _choose_advice(most, bool(group.lead.engine.get("activation_checkpointing"))),
        evidence={
            "estimate_bytes": float(estimate.gpu_bytes),
            "measured_bytes": total,
            **{f"{name.split()[0].rstrip(',')}_bytes": count for name, count in sizes.items()},
        },
    )


_INIT_ADVICE = (
    "Make the model under deepspeed.zero.Init (stage 3), or load it in 16 bit on the CPU: the engine's copies of it are what"
    " has to fit first."
)


def _choose_advice(most: str, checkpointing: bool) -> str:
    if most == "activations and temporaries":
        if checkpointing:
            return "Plan by this peak, not by the estimate; a smaller per_device_train_batch_size lowers it."
        return "Plan by this peak, not by the estimate; Trainer's gradient_checkpointing=True lowers it."
    if most == "reserved but unallocated":
        return "Start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: less is held that is not used."
    if most == "model states":
        return "Plan by this peak: the estimate assumes 16-bit training with Adam, and fp32 gradients that are kept."
    return (
        "Plan by this peak: CUDA's context and NCCL's buffers are the same for every batch; NCCL_BUFFSIZE lowers the latter."
    )
