"""The GPU works at an iteration's beginning and end, and idles in the middle while the CPU runs the optimizer.

Read from the probe's spans: the ``step`` of an optimizer on the CPU, in which the GPU sends gradients, waits, and receives
parameters. Cores, threads and bytes are the samplers'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.annotations.support.annotation import Annotation, Severity, build_step_finding
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Ints, Process
from zerotop.analysis.annotations.support.thresholds import (
    SPIKE_GAP_S,
    SPIKE_REPEAT_FACTOR,
    SPIKE_SHARE,
    SPIKE_SIMILAR_SHARE,
    SPIKE_STEPS,
)
from zerotop.analysis.formatting import format_bytes, format_count, format_percent, format_seconds
from zerotop.analysis.memory.zero_model import compute_expected, parse_setup
from zerotop.session.samples import Rows

Floats = NDArray[np.float64]

# The sampler's window: what a sample says is of so long before it.
_TICK_NS = 100_000_000


class CpuUse(NamedTuple):
    """A rank's process while the CPU optimizer runs."""

    cores: float
    threads: int  # that ran or wanted to


@dataclass
class _State:
    """How far the lead's steps were read, its last real ones (places and gaps), and the gap that was told."""

    steps_read: int = 0
    has_real_step: bool = False
    indices: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    gaps: Floats = field(default_factory=lambda: np.empty(0, np.float64))
    reported_gap: float | None = None


def detect(facts: Evidence) -> Iterator[Annotation]:
    """One finding while there is a gap; another one only where it has become quite another."""
    for group in facts.groups:
        if group.lead.is_on_gpu:
            yield from _check_group(facts, group)


def _check_group(facts: Evidence, group: Group) -> Iterator[Annotation]:
    lead, seen = group.lead, group.get_state(_State)
    if len(lead.steps) == seen.steps_read:
        return
    fresh = lead.steps[seen.steps_read :]
    real = np.flatnonzero(~fresh["skipped"])
    places = np.concatenate([seen.indices, seen.steps_read + real])[0 if seen.has_real_step else 1 :]
    gaps = np.concatenate([seen.gaps, _measure_gaps(lead, fresh)[real]])[0 if seen.has_real_step else 1 :]
    seen.has_real_step |= len(real) > 0
    seen.steps_read, seen.indices, seen.gaps = len(lead.steps), places[1 - SPIKE_STEPS :], gaps[1 - SPIKE_STEPS :]
    if len(places) < SPIKE_STEPS:
        return
    windows = np.lib.stride_tricks.sliding_window_view(gaps, SPIKE_STEPS)
    middle = np.median(windows, axis=1)
    usual = np.median(np.lib.stride_tricks.sliding_window_view(lead.steps["iteration_s"][places], SPIKE_STEPS), axis=1)
    like = (np.abs(windows - middle[:, None]) <= SPIKE_SIMILAR_SHARE * middle[:, None]).all(axis=1)
    shares = middle / np.maximum(usual, 1e-9)
    for place in np.flatnonzero(like & (middle >= SPIKE_GAP_S) & (shares >= SPIKE_SHARE)).tolist():
        gap = float(middle[place])
        if seen.reported_gap is None or not 1 / SPIKE_REPEAT_FACTOR < gap / seen.reported_gap < SPIKE_REPEAT_FACTOR:
            seen.reported_gap = gap
            yield _build_finding(facts, group, lead.steps[places[place : place + SPIKE_STEPS]], gap, float(shares[place]))


def _measure_gaps(lead: Process, rows: Rows) -> Floats:
    """Seconds of each step in which the GPU only copies: all of ``step``, where its optimizer ran on the CPU; else 0."""
    if lead.engine.get("offload_optimizer") in ("cpu", "nvme"):
        return np.asarray(rows["step_s"], np.float64)
    optimizer = lead.read_phases(int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1]), "cpu_optimizer")
    if not len(optimizer):
        return np.zeros(len(rows))
    of = np.searchsorted(rows["end_unix_ns"], optimizer.times, "left")
    on_cpu = np.bincount(of, minlength=len(rows) + 1)[: len(rows)] > 0
    return np.where(on_cpu, rows["step_s"], 0.0)


def _build_finding(facts: Evidence, group: Group, rows: Rows, gap: float, share: float) -> Annotation:
    lead, known_ns = group.lead, int(rows["end_unix_ns"][-1])
    ranks = group.ranks_at(known_ns)
    evidence = {
        "gap_s": gap,
        "iteration_s": float(np.median(rows["iteration_s"])),
        "share": share,
        "cpu_optimizer_s": float(np.median(rows["optimizer_s"])),
        "processes": float(len(ranks)),
        **_measure_work(group, rows),
        **_measure_traffic(lead, rows),
        **_measure_room(facts, lead, known_ns),
    }
    return build_step_finding(
        rows,
        name="double_spike",
        ranks=ranks,
        severity=Severity.WARNING,
        confidence=0.95,
        sentence=_describe_finding(evidence),
        advice=_choose_advice(evidence),
        evidence=evidence,
    )


def _measure_work(group: Group, rows: Rows) -> dict[str, float]:
    """Cores and threads of each rank while the optimizer ran in these steps; nothing where nobody sampled."""
    known_ns = int(rows["end_unix_ns"][-1])
    found = [
        busy
        for process in group.processes
        if process.source.created_ns <= known_ns and (busy := _measure_cpu_use(group.lead, process, rows)) is not None
    ]
    if not found:
        return {}
    cores = float(np.median([busy.cores for busy in found]))
    threads = float(np.median([busy.threads for busy in found]))
    host_cores = group.lead.facts.count_cores(group.lead.source.host)
    return {"cores_each": cores, "threads_each": threads} | ({"host_cores": float(host_cores)} if host_cores else {})


def _measure_cpu_use(lead: Process, process: Process, rows: Rows) -> CpuUse | None:
    """The process in ticks that lie within the optimizer's time; where it is shorter than a tick, in the busiest tick."""
    while_ns = int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])
    spans = lead.read_phases(*while_ns, "cpu_optimizer")
    spans = spans if len(spans) else lead.read_phases(*while_ns, "step")
    samples = process.host_samples.read_window(*while_ns)
    if not len(samples) or not len(spans):
        return None
    begins = lead.compute_begins(spans)
    of = np.searchsorted(spans.times, samples.times, "left")
    at = np.minimum(of, len(spans) - 1)
    inside = (of < len(spans)) & (samples.times >= begins[at] + _TICK_NS)
    cores = samples.rows["cores_used"].astype(np.float64)
    wanting = np.maximum(cores + np.nan_to_num(samples.rows["waiting_cores"]), samples.rows["busy_threads"])
    if np.isnan(cores).all():
        return None
    if inside.sum() >= SPIKE_STEPS:
        return CpuUse(float(np.nanmedian(cores[inside])), round(float(np.nanmedian(wanting[inside]))))
    most = int(np.nanargmax(cores))
    return CpuUse(float(cores[most]), round(float(wanting[most])))


def _measure_traffic(lead: Process, rows: Rows) -> dict[str, float]:
    """Bytes over PCIe in an iteration by the GPU's counters, which see at least so many, and what the copies must carry."""
    found: dict[str, float] = {}
    parameters = lead.engine.get("trainable_parameters")
    shared_by = lead.engine.get("data_parallel") or 1
    if isinstance(parameters, int) and lead.engine.get("dtype") in ("fp16", "bf16"):
        found["copied_each_way_bytes"] = 2.0 * parameters / shared_by
    samples = lead.gpu_samples.read_window(int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1]))
    for name, column in (("pcie_to_host_bytes", "pcie_tx_bytes"), ("pcie_to_gpu_bytes", "pcie_rx_bytes")):
        values = samples.rows[column] if len(samples) else np.empty(0)
        values = values[values >= 0]
        if len(values) > 1:
            lasted = (samples.times[-1] - samples.times[0]) / 1e9
            found[name] = float((values[-1] - values[0]) / lasted * np.median(rows["iteration_s"]))
    return found


def _measure_room(facts: Evidence, lead: Process, known_ns: int) -> dict[str, float]:
    """What the optimizer would need on the GPU, and what is free there at the most that was ever used."""
    found: dict[str, float] = {}
    parameters, shared_by = lead.engine.get("trainable_parameters"), lead.engine.get("data_parallel") or 1
    if isinstance(parameters, int):
        # Adam in mixed precision: master weights and two moments, 4 bytes each; gradients of 2, and, while it steps, 8 of
        # temporaries, as measured.
        found |= _estimate_without_offload(lead)
        found["optimizer_bytes"] = 12.0 * parameters / shared_by
        found["needed_bytes"] = 22.0 * parameters / shared_by
    samples = lead.gpu_samples.read_window(0, known_ns)
    if len(samples):
        found["gpu_free_bytes"] = float(samples.rows["total_bytes"][-1] - samples.rows["used_bytes"].max())
    return found


def _estimate_without_offload(lead: Process) -> dict[str, float]:
    """What each GPU would hold more by ZeRO's formulas without offload; nothing where they do not say."""
    job = parse_setup(lead.engine)
    if job is None or job.offload_optimizer == "none":
        return {}
    kept = compute_expected(dataclasses.replace(job, offload_optimizer="none")).gpu
    return {"without_offload_bytes": float(sum(kept.values()) - sum(compute_expected(job).gpu.values()))}


def _describe_finding(evidence: dict[str, float]) -> str:
    text = (
        f"In each iteration of {format_seconds(evidence['iteration_s'])} the GPU computes nothing for {format_seconds(evidence['gap_s'])}"
        f" ({format_percent(evidence['share'])}) while the optimizer runs on the CPU"
    )
    if "cores_each" in evidence:
        text += f": {format_count(int(evidence['processes']), 'process')} x {evidence['threads_each']:.0f} threads"
        text += f" on {evidence['cores_each']:.1f} cores each"
        text += f" of the host's {evidence['host_cores']:.0f}" if "host_cores" in evidence else ""
    moved = [evidence.get("pcie_to_host_bytes"), evidence.get("pcie_to_gpu_bytes")]
    least = evidence.get("copied_each_way_bytes")
    if moved[0] is not None and moved[1] is not None and (least is None or min(moved[0], moved[1]) >= least):
        text += f"; PCIe carries about {format_bytes(moved[0])} to the host and {format_bytes(moved[1])} back"
    elif least is not None:
        text += f"; about {format_bytes(least)} of gradients go to each rank's host memory and as much of parameters back"
    if "without_offload_bytes" in evidence:
        text += (
            f"; without offload the same step would keep {format_bytes(evidence['without_offload_bytes'])} more on each GPU"
        )
        text += f", where {format_bytes(evidence['gpu_free_bytes'])} were never used" if "gpu_free_bytes" in evidence else ""
    return text + "."


def _choose_advice(evidence: dict[str, float]) -> str:
    need, free = evidence.get("needed_bytes"), evidence.get("gpu_free_bytes")
    if need is not None and free is not None and need < free:
        return (
            f'Set "zero_optimization.offload_optimizer.device" to "none": the optimizer takes'
            f" {format_bytes(evidence['optimizer_bytes'])} of each GPU, {format_bytes(need)} with gradients and temporaries,"
            f" and {format_bytes(free)} were unused so far."
        )
    cores, processes = evidence.get("host_cores"), evidence["processes"]
    if cores and evidence.get("threads_each", 0) * processes > 1.5 * cores:
        return (
            f"Start with OMP_NUM_THREADS={max(1, int(cores // processes))}, or deepspeed --bind_cores_to_rank: the ranks'"
            f" {evidence['threads_each'] * processes:.0f} threads share {cores:.0f} cores."
        )
    return (
        'Raise "gradient_accumulation_steps" (Trainer: gradient_accumulation_steps): the optimizer then runs once for more'
        " micro-batches, and its pause counts for less."
    )
