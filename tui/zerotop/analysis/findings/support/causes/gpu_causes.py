"""Changes on the ranks' GPUs at the moment when the iteration time changed: clocks, and other processes."""

from __future__ import annotations

import numpy as np

from zerotop.analysis.findings.support.causes.step_change import Advice, Cause, StepChange
from zerotop.analysis.findings.support.evidence import Process, Samples
from zerotop.analysis.findings.support.gpu_use import find_own_processes
from zerotop.analysis.findings.support.thresholds import COMPUTING_PERCENT, FEW_SHARE, MOST_SHARE, OTHERS_BYTES, SLOWED_MASK
from zerotop.analysis.formatting import format_percent
from zerotop.analysis.stats.medians import compute_known_median
from zerotop.recording.samples import read_column
from zerotop_probe.recording import events

_POWER_CAP = 0x04
# A smaller drop of the clock is usual variation.
_CLOCK_SHARE = 0.05
# A GPU that computes at a lower clock is busy as long, or longer. The share of the time by which its use may vary.
_IDLER_SHARE = 0.1
# The share of a slowdown that a clock must explain: kernels take longer by as much as it falls, at most.
_EXPLAINED_SHARE = 0.5
# How long a finding waits for a sample of the processes' GPU use (ns), which is taken once a second.
_SAMPLED_NS = 1_000_000_000
USE_NS = 2 * _SAMPLED_NS + 200_000_000

_CLOCK: Advice = (
    "Check the node's cooling and power supply: no {tool} setting changes their limits.",
    "nvidia-smi -q -d PERFORMANCE",
)
_MAY_COMPUTE = "It may compute there: see whose it is, and keep one of the jobs off with CUDA_VISIBLE_DEVICES."
_COMPUTES = "See whose it is, and keep one of the jobs off with CUDA_VISIBLE_DEVICES: they take turns on the GPU."
OWN_ADVICE = "Have it compute less often, between steps, or on another GPU: it and the rank take turns on the GPU."


def check_clocks(change: StepChange) -> Cause | None:
    samples = change.read_samples(change.process.gpu_samples)
    if samples is None or not _explains_change(change, *_read_clocks(*samples)):
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
    before, after = _read_clocks(*samples)
    # An unknown clock is NaN, which compares false.
    if not after < (1 - _CLOCK_SHARE) * before or not _explains_change(change, before, after):
        return None
    busy_before, busy_after = change.measure_gpu_uses(change.process)
    if busy_after < busy_before - _IDLER_SHARE:  # its clock falls because it has less to do
        return None
    return Cause(f"the SM clock fell from {before:.0f} to {after:.0f} MHz", *_CLOCK, 0.7)


def _read_clocks(before: Samples, after: Samples) -> tuple[float, float]:
    first, last = (float(np.median(part.rows["sm_clock_mhz"])) for part in (before, after))
    return first, last


def _explains_change(change: StepChange, before_mhz: float, after_mhz: float) -> bool:
    """Whether the clock fell far enough for the slowdown; true where a clock is unknown."""
    usual_s = compute_known_median(change.before["iteration_s"])
    return not (before_mhz - after_mhz) * usual_s < _EXPLAINED_SHARE * change.added_s * after_mhz


def awaits_use(change: StepChange) -> bool:
    """Whether a sample after the change will show how much other processes compute on the ranks' GPUs."""
    return any(_measures_use(process) and _find_others(change, process) for process in change.group.processes)


def check_neighbours(change: StepChange) -> Cause | None:
    """Return the cause that another process may compute on a rank's GPU, which delays everything that waits for the GPU.

    Usually these are the phases. If the time between them grew, for example because a batch is copied to the GPU there, the
    other process must have begun to compute: one that computed before may get more of the GPU just because the job uses
    less.
    """
    before, after = change.measure_own()
    if change.added_s <= 0:
        return None
    must_begin = not after - before <= change.added_s / 2  # also where it is unknown
    found = [
        cause
        for process in change.group.processes
        for pid in _find_others(change, process)
        if (cause := _describe_other(change, process, pid, must_begin)) is not None
    ]
    return max(found, key=lambda cause: cause.confidence, default=None)


def _find_others(change: StepChange, process: Process) -> list[int]:
    """Return the foreign processes on a rank's GPU; none if they cannot be told from the job's own."""
    rows = _read_uses(process, int(change.after["begin_unix_ns"][0]) - USE_NS, int(change.after["end_unix_ns"][-1])).rows
    if not len(rows):
        return []
    is_large = (rows["used_bytes"] >= OTHERS_BYTES) | (read_column(rows, "sm_percent") >= COMPUTING_PERCENT)
    pids = set(rows["pid"][is_large].tolist())
    job_pids = {other.key for other in change.group.processes}
    others = [pid for pid in sorted(pids) if (process.host, pid) not in job_pids]
    # In a container NVML has the host's PIDs: then no process of the job is among them.
    return others if len(others) < len(pids) else []


def _measures_use(process: Process) -> bool:
    """Whether this recording contains how much processes compute on GPUs; older ones do not."""
    sources = process.at.recording.sources["gpu_processes"]
    return any("sm_percent" in (source.array.dtype.names or ()) for source in sources)


def _read_uses(process: Process, begin_ns: int, end_ns: int) -> Samples:
    host, gpu = process.gpu_key or ("", -1)
    return process.at.records("gpu_processes", host, "gpu", gpu).read_window(begin_ns, end_ns)


def _describe_other(change: StepChange, process: Process, pid: int, must_begin: bool) -> Cause | None:
    """Describe what another process does on a rank's GPU; None if it is known not to compute more than before.

    ``must_begin``: also None unless it is known to compute now and not to have computed before.
    """
    _, gpu = process.gpu_key or ("", -1)
    changed_ns = int(change.after["begin_unix_ns"][0])
    # A sample covers the second before it, and a few short steps may contain none.
    parts = (
        _read_uses(process, min(int(change.before["begin_unix_ns"][0]), changed_ns - USE_NS), changed_ns),
        _read_uses(process, changed_ns + _SAMPLED_NS, change.known_ns),
    )
    if len(parts[1]) and pid not in parts[1].rows["pid"]:
        return None  # it has left
    uses = [read_column(part.rows[part.rows["pid"] == pid], "sm_percent") if len(part) else np.empty(0) for part in parts]
    before, after = (use[~np.isnan(use)] for use in uses)
    is_own = pid in find_own_processes(process.at.at(change.known_ns), process.host)
    name = f"process {pid}{_name_program(process, pid)}"
    name, fix = (f"the job's own {name}", "") if is_own else (name, f"ps -o user,lstart,cmd -p {pid}")
    if must_begin and (not len(after) or (len(before) and before.mean() >= COMPUTING_PERCENT)):
        return None
    if not len(after):
        return Cause(f"{name} is on GPU {gpu} too", OWN_ADVICE if is_own else _MAY_COMPUTE, fix, 0.5)
    used, rise = float(after.mean()), float(after.mean() - (before.mean() if len(before) else 0.0))
    if rise < COMPUTING_PERCENT:
        return None
    text = f"{name} uses {format_percent(used / 100)} of GPU {gpu}"
    if is_own:
        return Cause(text, OWN_ADVICE, fix, 0.85, finding="own_process_on_gpu")
    return Cause(text, _COMPUTES, fix, 0.85, finding="others_arrived")


def _name_program(process: Process, pid: int) -> str:
    """Return `` (python train.py of ann)``, or "" if that was not recorded."""
    found = [
        event
        for event in process.recording.events_of(events.GpuProcess)
        if event.process_key == (process.host, pid) and event.program
    ]
    if not found:
        return ""
    user = found[-1].user
    return f" ({found[-1].program}{f' of {user}' if user else ''})"
