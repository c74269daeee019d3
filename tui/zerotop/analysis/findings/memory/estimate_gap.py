"""DeepSpeed's estimate for this stage and offload, the measured peak of the GPU, and the part that differs most.

Read from the ledger at the highest peak, after PLATEAU_STEPS real steps have followed the first one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.findings.support import Evidence, Finding, FindingKind, Group, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.steps.fp16_warmup import count_skipped_first
from zerotop.analysis.findings.support.thresholds import PLATEAU_STEPS
from zerotop.analysis.formatting import GIB
from zerotop.analysis.memory import ledger_rows
from zerotop.analysis.memory.expected.deepspeed_estimates import Estimate
from zerotop.analysis.memory.expected.zero_model import estimate_job, is_for_setup, parse_setup
from zerotop.analysis.memory.peak_ledger import PeakLedger, read_peak_ledgers
from zerotop.recording.samples import Rows

_KIND = FindingKind(
    name="estimate_gap",
    severity=Severity.INFO,
    confidence=0.9,
    headline="The GPU held {at_most}{measured_bytes:bytes} when most was allocated; DeepSpeed says {estimate_bytes:bytes}",
    details=(
        "The largest part of the difference is {most}: {difference:bytes} {direction}. At the peak, {place}[{entered}]:"
        " model states {model_bytes:bytes}, {others} {activations_bytes:bytes}, reserved but unallocated"
        " {reserved_bytes:bytes}, context, NCCL and cuBLAS {at_most}{context_bytes:bytes}. The estimate covers model states"
        " only, for stage {stage} with {options}."
    ),
)
# The estimator covers these. Its formulas contain none of the other rows.
_MODEL_STATES = ("parameters", "gradients", "master_weights", "optimizer_state", "buffers")
_STATES, _ACTIVATIONS, _RESERVED, _CONTEXT = (
    "model states",
    "activations and temporaries",
    "reserved but unallocated bytes",
    "context, NCCL and cuBLAS",
)
_LEDGER_ROWS = {
    _STATES: _MODEL_STATES,
    _ACTIVATIONS: (
        ledger_rows.ACTIVATIONS,
        ledger_rows.HELD,
        ledger_rows.GROWN,
        ledger_rows.UNATTRIBUTED,
        ledger_rows.UNEXPLAINED,
    ),
    _RESERVED: (ledger_rows.UNALLOCATED, ledger_rows.OTHER_STREAMS, ledger_rows.PRIVATE),
    _CONTEXT: (ledger_rows.OUTSIDE, ledger_rows.OTHER_RANKS, ledger_rows.CUBLAS),
}
# Advice and fix by what differs most.
_ADVICE = {
    _STATES: ("Plan by this peak: the estimate assumes 16-bit training with Adam, and fp32 gradients that stay.", ""),
    _ACTIVATIONS: ("Plan by this peak, not by the estimate. Recomputing activations lowers it.", "{recompute_fix}"),
    _RESERVED: (
        "Start with expandable segments: less reserved memory then stays unused.",
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    _CONTEXT: ("Plan by this peak: CUDA's context and NCCL's buffers are the same for every batch.", ""),
}
_CHECKPOINTING_ADVICE = "Plan by this peak, not by the estimate. A lower {batch_size} lowers it.", ""
_INIT_ADVICE = (
    "Create the model under deepspeed.zero.Init (stage 3), or load it in 16 bit on the CPU: the engine's copies of it have"
    " to fit first.",
    "with deepspeed.zero.Init():",
)
# Least difference from the estimate, both limits. Smaller ones come from allocation granularity and varying batches.
GAP_BYTES = 1 * GIB
GAP_SHARE = 0.10


@in_each_attempt()
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report at most once for each attempt."""
    lead = window.subject.lead
    first = count_skipped_first(lead)
    steps = lead.steps[first + 1 : first + 1000]
    real = np.flatnonzero(~steps["skipped"])[:PLATEAU_STEPS]
    if len(real) == PLATEAU_STEPS:
        window.is_closed = True
        yield _check_group(window.recording, window.subject, steps[real])


def _check_group(recording: Evidence, group: Group, rows: Rows) -> Finding | None:
    setup, gpu = parse_setup(group.lead.engine), group.lead.gpu_key
    estimates = [one for one in estimate_job(setup) if is_for_setup(one, setup)] if setup is not None else []
    ledgers = read_peak_ledgers(recording.at.at(int(rows["end_unix_ns"][-1])), [gpu]) if gpu is not None else ()
    peaks = [one for one in ledgers if group.lead.rank in one.ledger.ranks]
    if not estimates or not peaks:
        return None
    # Estimates that differ only in how the model was created, which is unknown, are the same for GPUs.
    estimate, peak = estimates[0], peaks[0]
    sizes = {name: peak.ledger.sum_bytes(*keys) / len(peak.ledger.ranks) for name, keys in _LEDGER_ROWS.items()}
    gap = sum(sizes[name] for name in _list_known(peak)) - estimate.gpu_bytes
    is_large = abs(gap) >= max(GAP_BYTES, GAP_SHARE * estimate.gpu_bytes)
    return _build_finding(group, rows, estimate, peak, sizes) if is_large else None


def _list_known(peak: PeakLedger) -> list[str]:
    """Return the parts that were measured: of what is outside PyTorch NVML may have told no more than a bound."""
    is_bound = any(row.is_bound for row in peak.ledger.rows)
    return [name for name in _LEDGER_ROWS if name != _CONTEXT or not is_bound]


def _build_finding(group: Group, rows: Rows, estimate: Estimate, peak: PeakLedger, sizes: dict[str, float]) -> Finding:
    # Before the first step nothing is an activation.
    others = _ACTIVATIONS if peak.peak.is_in_step else "other tensors"
    differences = {**sizes, _STATES: sizes[_STATES] - estimate.gpu_bytes}
    known = _list_known(peak)
    most = max(known, key=lambda name: abs(differences[name]))
    advice, fix = _ADVICE[most]
    if not group.is_memory_short(int(rows["end_unix_ns"][-1])):
        advice, fix = "", ""
    elif peak.peak.phase == "init":
        advice, fix = _INIT_ADVICE
    elif most == _ACTIVATIONS and group.lead.engine.activation_checkpointing:
        advice, fix = _CHECKPOINTING_ADVICE
    evidence = {"estimate_bytes": estimate.gpu_bytes, "measured_bytes": sum(sizes.values())}
    return _KIND.with_changes(advice=advice, fix=fix).at_steps(
        group,
        rows,
        evidence | {f"{name.split()[0].rstrip(',')}_bytes": size for name, size in sizes.items()},
        most=others if most == _ACTIVATIONS else most,
        others=others,
        at_most="" if _CONTEXT in known else "at most ",
        difference=abs(differences[most]),
        direction="more" if differences[most] > 0 else "less",
        place=peak.peak.place_text,
        entered=" (the highest since the probe entered)" if peak.before is not None else None,
        stage=estimate.stage,
        options=estimate.option_text,
    )
