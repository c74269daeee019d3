"""What changed on the GPUs of the ranks when iterations began to take another time: clocks, and other processes."""

from __future__ import annotations

import numpy as np

from zerotop.analysis.annotations.support.causes.step_change import Advice, Cause, StepChange, compute_own_seconds
from zerotop.analysis.annotations.support.evidence import Process, Samples
from zerotop.analysis.annotations.support.record_window import read_column
from zerotop.analysis.annotations.support.thresholds import FEW_SHARE, MOST_SHARE, OTHERS_BYTES, SLOWED_MASK
from zerotop.analysis.formatting import format_percent
from zerotop_probe.recording import events

_POWER_CAP = 0x04
# A clock that falls by less varies as usual.
_CLOCK_SHARE = 0.05
# Another process computes on a GPU from this share of its time on (percent): an idle one is measured as 0 or 1.
_COMPUTING_PERCENT = 5.0

_CLOCK: Advice = (
    "Check the node's cooling and power supply: no {tool} setting changes their limits.",
    "nvidia-smi -q -d PERFORMANCE",
)
_MAY_COMPUTE = "It may compute there: see whose it is, and keep one of the jobs off with CUDA_VISIBLE_DEVICES."
_COMPUTES = "See whose it is, and keep one of the jobs off with CUDA_VISIBLE_DEVICES: they take turns on the GPU."


def check_clocks(change: StepChange) -> Cause | None:
    samples = change.read_samples(change.process.gpu_samples)
    if samples is None:
        return None
    reasons = [part.rows["throttle_reasons"] for part in samples]
    for bits, name in ((SLOWED_MASK, "the GPU slowed its clocks down"), (_POWER_CAP, "the GPU reached its power limit")):
        shares = [float(np.mean(part & bits != 0)) for part in reasons]
        is_known = all((part >= 0).all() for part in reasons)
        if is_known and shares[0] < FEW_SHARE and shares[1] > MOST_SHARE:
            clock = float(np.median(samples[1].rows["sm_clock_mhz"]))
            text = f"{name} in {format_percent(shares[1])} of samples (SM clock {clock:.0f} MHz)"
            return Cause(text, *_CLOCK, 0.8, finding="throttled" if bits == SLOWED_MASK else "")
    return None


def check_slower_clock(change: StepChange) -> Cause | None:
    samples = change.read_samples(change.process.gpu_samples)
    if samples is None:
        return None
    before, after = (float(np.median(part.rows["sm_clock_mhz"])) for part in samples)
    # An unknown clock is NaN, which compares false.
    if not after < (1 - _CLOCK_SHARE) * before:
        return None
    return Cause(f"the SM clock fell from {before:.0f} to {after:.0f} MHz", *_CLOCK, 0.7)


def check_neighbours(change: StepChange) -> Cause | None:
    """Another process on a rank's GPU computes there, or may: the phases that use the GPU take longer then."""
    begin_ns, end_ns = int(change.after["begin_unix_ns"][0]), int(change.after["end_unix_ns"][-1])
    own = compute_own_seconds(change.after), compute_own_seconds(change.before)
    slower = float(np.median(change.after["iteration_s"]) - np.median(change.before["iteration_s"]))
    if slower <= 0 or float(np.median(own[0]) - np.median(own[1])) > slower / 2:
        return None
    job_pids = {process.key for process in change.group.processes}
    found: list[Cause] = []
    for process in change.group.processes:
        host, gpu = process.gpu_key or ("", -1)
        samples = process.recording.get_records("gpu_processes", host, "gpu", gpu).read_window(begin_ns, end_ns)
        pids = set(samples.rows["pid"][samples.rows["used_bytes"] >= OTHERS_BYTES].tolist()) if len(samples) else set()
        pids |= _find_computing(samples)
        # In a container NVML has the host's PIDs: then the job's processes cannot be recognized.
        others = [pid for pid in sorted(pids) if (host, pid) not in job_pids]
        if others and len(others) < len(pids):
            found += [cause for pid in others if (cause := _describe_other(change, process, pid)) is not None]
    return max(found, key=lambda cause: cause.confidence, default=None)


def _find_computing(samples: Samples) -> set[int]:
    if not len(samples):
        return set()
    return set(samples.rows["pid"][read_column(samples.rows, "sm_percent") >= _COMPUTING_PERCENT].tolist())


def _describe_other(change: StepChange, process: Process, pid: int) -> Cause | None:
    """Return what another process on a rank's GPU does there; None if it is known not to compute more than before."""
    host, gpu = process.gpu_key or ("", -1)
    records = process.recording.get_records("gpu_processes", host, "gpu", gpu)
    parts = [
        records.read_window(int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1]))
        for rows in (change.before, change.after)
    ]
    uses = [read_column(part.rows[part.rows["pid"] == pid], "sm_percent") if len(part) else np.empty(0) for part in parts]
    before, after = (use[~np.isnan(use)] for use in uses)
    name, fix = f"process {pid}{_name_program(process, pid)}", f"ps -o user,lstart,cmd -p {pid}"
    if not len(after):
        return Cause(f"{name} is on GPU {gpu} too", _MAY_COMPUTE, fix, 0.5)
    used, rise = float(after.mean()), float(after.mean() - (before.mean() if len(before) else 0.0))
    if rise < _COMPUTING_PERCENT:
        return None
    text = f"{name} uses {format_percent(used / 100)} of GPU {gpu}"
    return Cause(text, _COMPUTES, fix, 0.85, finding="others_arrived")


def _name_program(process: Process, pid: int) -> str:
    """Return `` (python train.py of ann)``, or "" if that was not recorded."""
    found = [
        event.facts
        for event in process.recording.events_named(events.GPU_PROCESS)
        if (event.host, event.facts.get("pid")) == (process.host, pid) and event.facts.get("program")
    ]
    if not found:
        return ""
    user = found[-1].get("user")
    return f" ({found[-1]['program']}{f' of {user}' if user else ''})"
