"""The GPU works at the begin and end of an iteration, and idles in the middle while the CPU runs the optimizer.

Read from the probe's spans: in ``step`` of an optimizer on the CPU, the GPU sends gradients, waits, and receives parameters.
Cores, threads and bytes come from the samplers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.findings.support.evidence import Floats, Group, Process, Rows
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.analysis.findings.support.gpu_use import measure_free_bytes
from zerotop.analysis.findings.support.thresholds import SPIKE_GAP_S, SPIKE_SHARE, SPIKE_SIMILAR_SHARE, SPIKE_STEPS
from zerotop.analysis.findings.support.window import SearchWindow, in_each_attempt
from zerotop.analysis.memory.expected.peak_moments import Workload, list_update
from zerotop.analysis.memory.expected.zero_model import compute_expected, is_foreach, parse_setup
from zerotop.analysis.memory.tensor_inventory import GRADIENTS
from zerotop.recording.moments.at import find_cores
from zerotop_probe.recording.events import EngineFacts

_KIND = FindingKind(
    name="double_spike",
    severity=Severity.WARNING,
    confidence=0.95,
    headline="GPUs idle {share:percent} of each iteration while the CPU runs the optimizer",
    details=(
        "In steps {step} to {last_step} the optimizer takes {gap_s:seconds} of {iteration_s:seconds}"
        "[, in {processes:count process} x {threads_each:.0f} threads on {cores_each:.1f} cores each"
        "[ of the host's {host_cores:.0f}]]"
        "[. PCIe carries about {to_host:bytes} to the host and {to_gpu:bytes} back]"
        "[. About {copied:bytes} of gradients go to each rank's host memory and as much of parameters back]"
        "[. Without offload each GPU would hold {without_offload_bytes:bytes} more"
        "[, and {gpu_free_bytes:bytes} were never used]]."
    ),
    advice="Accumulate more micro-batches: the optimizer then runs once for all of them.",
    fix="{accumulation_fix}",
)
_NO_OFFLOAD = _KIND.with_changes(
    advice=(
        "Keep the optimizer on the GPU: it needs {optimizer_bytes:bytes} there, {needed_bytes:bytes} with gradients and"
        " temporaries, and {gpu_free_bytes:bytes} were never used."
    ),
    fix='"offload_optimizer": {"device": "none"}',
)
_FEWER_THREADS = _KIND.with_changes(
    advice="Start with as many threads as each rank has cores: {threads:.0f} threads share {host_cores:.0f}.",
    fix="export OMP_NUM_THREADS={rank_cores}",
)
# The gap is reported again when it has become longer or shorter by this factor: on a host that others use too it varies by
# a third, and a shift of iterations is a finding of its own.
SPIKE_REPEAT_FACTOR = 2.0
# Samples of NVML that show a GPU's use.
_FEWEST_SAMPLES = 3
# A sample of the processes covers this time before it (ns).
_TICK_NS = 100_000_000


class CpuUse(NamedTuple):
    """The cores and threads of a rank's process while the CPU optimizer runs."""

    cores: float
    threads: int  # runnable


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report a gap, and again where it has changed by SPIKE_REPEAT_FACTOR."""
    group, lead = window.subject, window.subject.lead
    new = window.steps(lead.phased_steps) if lead.is_on_gpu else slice(0)
    fresh = lead.phased_steps[new]
    real = np.flatnonzero(~fresh["skipped"])
    # The first real step is left out.
    first = window.find_once(lambda: next(iter((real + new.start).tolist()), None))
    real = real[real + new.start != first]
    measured = zip((real + new.start).tolist(), _measure_gaps(lead, fresh)[real].tolist(), strict=True) if len(real) else ()
    together = window.results(measured, SPIKE_STEPS - 1)
    if len(together) < SPIKE_STEPS:
        return
    indices, gaps = (np.array(column) for column in zip(*together, strict=True))
    windows = np.lib.stride_tricks.sliding_window_view(gaps, SPIKE_STEPS)
    middle = np.median(windows, axis=1)
    usual = np.median(
        np.lib.stride_tricks.sliding_window_view(lead.phased_steps["iteration_s"][indices], SPIKE_STEPS), axis=1
    )
    similar = (np.abs(windows - middle[:, None]) <= SPIKE_SIMILAR_SHARE * middle[:, None]).all(axis=1)
    shares = middle / np.maximum(usual, 1e-9)
    for at in np.flatnonzero(similar & (middle >= SPIKE_GAP_S) & (shares >= SPIKE_SHARE)).tolist():
        if window.is_news(gap := float(middle[at]), _has_changed):
            rows = lead.phased_steps[indices[at : at + SPIKE_STEPS]]
            yield _build_finding(group, rows, gap, min(float(shares[at]), _measure_idle(group, rows)))


def _measure_idle(group: Group, rows: Rows) -> float:
    """Return the share of some steps in which no kernel ran on the GPUs; 1 where that is unknown.

    A GPU may still work when the optimizer's phase begins, and casts and copies at both of its ends.
    """
    window = int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])
    each = [process.gpu_samples.read_window(*window) for process in group.processes if process.gpu_key is not None]
    used = np.concatenate([samples.rows["utilization_percent"] for samples in each if len(samples)] or [np.empty(0)])
    used = used[~np.isnan(used)]
    return 1 - float(used.mean()) / 100 if len(used) >= _FEWEST_SAMPLES else 1.0


def _has_changed(last: float, gap: float) -> bool:
    return not 1 / SPIKE_REPEAT_FACTOR < gap / last < SPIKE_REPEAT_FACTOR


def _measure_gaps(lead: Process, rows: Rows) -> Floats:
    """Return the seconds of each step in which the GPU only copies: ``step`` if its optimizer is on the CPU, else 0."""
    if lead.engine.offload_optimizer in ("cpu", "nvme"):
        return np.asarray(rows["step_s"], np.float64)
    optimizer = lead.read_phases(int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1]), "cpu_optimizer")
    if not len(optimizer):
        return np.zeros(len(rows))
    index = np.searchsorted(rows["end_unix_ns"], optimizer.times, "left")
    on_cpu = np.bincount(index, minlength=len(rows) + 1)[: len(rows)] > 0
    return np.where(on_cpu, rows["step_s"], 0.0)


def _build_finding(group: Group, rows: Rows, gap: float, share: float) -> Finding:
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
        **_measure_room(group, known_ns),
    }
    to_host, to_gpu = evidence.get("pcie_to_host_bytes"), evidence.get("pcie_to_gpu_bytes")
    copied = evidence.get("copied_each_way_bytes")
    # Counters that see less than must be copied have missed some of it.
    is_counted = to_host is not None and to_gpu is not None and (copied is None or min(to_host, to_gpu) >= copied)
    copies: dict[str, Any] = {"to_host": to_host, "to_gpu": to_gpu} if is_counted else {"copied": copied}
    cores, threads = evidence.get("host_cores", 0), evidence.get("threads_each", 0) * len(ranks)
    kind = _KIND
    if evidence.get("needed_bytes", np.inf) < evidence.get("gpu_free_bytes", 0):
        kind = _NO_OFFLOAD
    elif cores and threads > 1.5 * cores:
        kind = _FEWER_THREADS
    rank_cores = max(1, int(cores // max(1, len(ranks))))
    values = {"last_step": int(rows["step"][-1]), "threads": threads, "rank_cores": rank_cores, **copies}
    return kind.at_steps(group, rows, evidence, cost=share, **values)


def _measure_work(group: Group, rows: Rows) -> dict[str, float]:
    """Return the cores and threads of each rank while the optimizer ran in these steps; empty if nothing was sampled."""
    known_ns = int(rows["end_unix_ns"][-1])
    uses = [
        use
        for process in group.processes
        if process.source.created_ns <= known_ns and (use := _measure_cpu_use(group.lead, process, rows)) is not None
    ]
    if not uses:
        return {}
    cores = float(np.median([use.cores for use in uses]))
    threads = float(np.median([use.threads for use in uses]))
    host_cores = find_cores(group.lead.at, group.lead.host)
    return {"cores_each": cores, "threads_each": threads} | ({"host_cores": float(host_cores)} if host_cores else {})


def _measure_cpu_use(lead: Process, process: Process, rows: Rows) -> CpuUse | None:
    """Return the median of the ticks within the optimizer's time, or the busiest tick if it is shorter than a tick."""
    bounds = int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])
    spans = lead.read_phases(*bounds, "cpu_optimizer")
    spans = spans if len(spans) else lead.read_phases(*bounds, "step")
    samples = process.host_samples.read_window(*bounds)
    if not len(samples) or not len(spans):
        return None
    index = np.searchsorted(spans.times, samples.times, "left")
    begins = lead.compute_begins(spans)[np.minimum(index, len(spans) - 1)]
    inside = (index < len(spans)) & (samples.times >= begins + _TICK_NS)
    cores = samples.rows["cores_used"].astype(np.float64)
    runnable = np.maximum(cores + np.nan_to_num(samples.rows["waiting_cores"]), samples.rows["busy_threads"])
    if np.isnan(cores).all():
        return None
    if inside.sum() >= SPIKE_STEPS:
        return CpuUse(float(np.nanmedian(cores[inside])), round(float(np.nanmedian(runnable[inside]))))
    most = int(np.nanargmax(cores))
    return CpuUse(float(cores[most]), round(float(runnable[most])))


def _measure_traffic(lead: Process, rows: Rows) -> dict[str, float]:
    """Return the bytes that an iteration must copy each way, and PCIe bytes by the GPU's counters, which may miss some."""
    traffic: dict[str, float] = {}
    parameters = lead.engine.trainable_parameters
    shared_by = lead.engine.data_parallel or 1
    if isinstance(parameters, int) and lead.engine.dtype in ("fp16", "bf16"):
        traffic["copied_each_way_bytes"] = 2.0 * parameters / shared_by
    samples = lead.gpu_samples.read_window(int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1]))
    for name, column in (("pcie_to_host_bytes", "pcie_tx_bytes"), ("pcie_to_gpu_bytes", "pcie_rx_bytes")):
        counts = samples.rows[column] if len(samples) else np.empty(0)
        counts = counts[counts >= 0]
        if len(counts) > 1:
            duration = (samples.times[-1] - samples.times[0]) / 1e9
            traffic[name] = float((counts[-1] - counts[0]) / duration * np.median(rows["iteration_s"]))
    return traffic


def _measure_room(group: Group, known_ns: int) -> dict[str, float]:
    """Return the bytes that the optimizer would need on the GPU, and the bytes that were always free there."""
    room = _estimate_without_offload(group.lead.engine)
    free = measure_free_bytes(group.lead, known_ns)
    return room if np.isnan(free) else room | {"gpu_free_bytes": free}


def _estimate_without_offload(engine: EngineFacts) -> dict[str, float]:
    """Return the additional bytes on each GPU without offload, by the formulas of ``what-if``; empty without any."""
    setup = parse_setup(engine)
    if setup is None or setup.offload_optimizer == "none":
        return {}
    without = dataclasses.replace(setup, offload_optimizer="none")
    before, after = compute_expected(setup).gpu, compute_expected(without).gpu
    states = sum(size - before[name] for name, size in after.items() if name != GRADIENTS)
    update = list_update(without, Workload(1, 1, foreach=is_foreach(engine)))
    return {
        "without_offload_bytes": float(sum(after.values()) - sum(before.values())),
        "optimizer_bytes": float(states),
        "needed_bytes": states + sum(row.bytes for row in update),
    }
