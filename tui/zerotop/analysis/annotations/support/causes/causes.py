"""What else changed, as far as it was recorded, when iterations began to take another time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from zerotop.analysis.annotations.support.causes.step_change import Cause, StepChange, measure_collecting
from zerotop.analysis.annotations.support.evidence import Floats, Rows
from zerotop.analysis.annotations.support.fp16_warmup import SKIPPED_STEPS, count_skipped_first
from zerotop.analysis.annotations.support.host_load import CoreLoad, measure_load
from zerotop.analysis.annotations.support.lines.known_calls import EMPTY_CACHE
from zerotop.analysis.annotations.support.lines.stack_lines import BETWEEN
from zerotop.analysis.annotations.support.thresholds import (
    HOST_GROWTH_BYTES,
    OTHERS_BYTES,
    SLOWED_MASK,
    STALL_SECONDS,
    STALL_SHARE,
    STRAGGLER_SHARE,
    TAKEN_SHARE,
)
from zerotop.analysis.formatting import Text, format_percent, format_seconds

_POWER_CAP = 0x04
# A condition is there when most samples show it, and was not when few did.
_MOST_SHARE, _FEW_SHARE = 0.5, 0.1
# A clock that falls by less varies as usual.
_CLOCK_SHARE = 0.05

# Bytes of reserved memory returned to the driver at once: more than a segment or two.
_CLEARED_BYTES = 64 << 20

# Advice and fix.
_Advice = tuple[str, str]
_BREAKDOWN: _Advice = ("{breakdown}", "{breakdown_fix}")
_CLOCK: _Advice = (
    "Check the node's cooling and power supply: no {tool} setting changes their limits.",
    "nvidia-smi -q -d PERFORMANCE",
)
_LENGTH: _Advice = ("Group samples of similar length, so that batches take similar time.", "{grouping_fix}")
_RETRY: _Advice = (
    "Start with expandable segments, or lower {batch_size}.",
    "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
)
_CLEARING: _Advice = (
    "Remove torch.cuda.empty_cache() from the loop: each next step asks the driver for its memory anew. Against"
    " fragmentation expandable segments help.",
    "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
)
_CORES: _Advice = ("Give each rank cores of its own, and as many threads as it has cores.", "{own_cores_fix}")
_LATE_ADVICE = "See what only that rank does between the phases: do it less often, or in a thread of its own."
_NEIGHBOUR_ADVICE = "It may compute there: see whose it is, and keep one of the jobs off with CUDA_VISIBLE_DEVICES."
_OTHERS: _Advice = ("See what runs beside the job: the ranks wait for cores.", "top -b -n 1 -o %CPU | head -20")
_COLLECTOR: _Advice = (
    "Call gc.freeze() once model and data are loaded: the collector then looks only at what was made since.",
    "gc.collect(); gc.freeze()",
)
_GROWTH: _Advice = ("Look for a list that grows with each step and that each step iterates over.", "")


def find_cause(change: StepChange) -> Cause | None:
    """Return the most certain cause of a sudden change that was recorded."""
    return next((cause for check in _CHECKS if (cause := check(change)) is not None), None)


def find_drift_cause(change: StepChange) -> Cause | None:
    """Return the most certain cause of a slow change that was recorded."""
    return next((cause for check in _DRIFT_CHECKS if (cause := check(change)) is not None), None)


def _check_skipping(change: StepChange) -> Cause | None:
    before, after = float(change.before["skipped"].mean()), float(change.after["skipped"].mean())
    if before > _MOST_SHARE and after < _MOST_SHARE:
        at_start = count_skipped_first(change.process) >= SKIPPED_STEPS and change.before["step"][0] < SKIPPED_STEPS
        advice = "Train in bf16: no step is skipped then."
        return Cause("fp16 stopped skipping steps", advice, "{bf16_fix}", 0.95, has_own_finding=bool(at_start))
    if before < _FEW_SHARE and after > _MOST_SHARE:
        advice = "Skipped steps train nothing: train in bf16, or {rarer_growth}."
        return Cause("fp16 began to skip steps", advice, "{bf16_fix}", 0.95)
    return None


def _check_tokens(change: StepChange) -> Cause | None:
    before, after = float(np.median(change.before["tokens"])), float(np.median(change.after["tokens"]))
    if min(before, after) <= 0:
        return None
    slower = np.log(np.median(change.after["iteration_s"]) / np.median(change.before["iteration_s"]))
    larger = np.log(after / before)
    if slower * larger <= 0 or abs(larger) < abs(slower) / 2:
        return None
    text = f"a rank's batches have {after:.0f} tokens instead of {before:.0f}"
    return Cause(text, *_LENGTH, 0.9, is_expected=bool(larger >= slower))


def _check_data(change: StepChange) -> Cause | None:
    data, iteration = float(np.median(change.after["data_s"])), float(np.median(change.after["iteration_s"]))
    waited = data - float(np.median(change.before["data_s"]))
    slower = iteration - float(np.median(change.before["iteration_s"]))
    if slower <= 0 or waited < slower / 2 or data < max(STALL_SECONDS, STALL_SHARE * iteration):
        return None
    return Cause("iterations began to wait for data", "", "", 0.95, has_own_finding=True)


def _check_clocks(change: StepChange) -> Cause | None:
    samples = change.read_samples(change.process.gpu_samples)
    if samples is None:
        return None
    reasons = [part.rows["throttle_reasons"] for part in samples]
    for bits, name in ((SLOWED_MASK, "the GPU slowed its clocks down"), (_POWER_CAP, "the GPU reached its power limit")):
        shares = [float(np.mean(part & bits != 0)) for part in reasons]
        is_known = all((part >= 0).all() for part in reasons)
        if is_known and shares[0] < _FEW_SHARE and shares[1] > _MOST_SHARE:
            clock = float(np.median(samples[1].rows["sm_clock_mhz"]))
            text = f"{name} in {format_percent(shares[1])} of samples (SM clock {clock:.0f} MHz)"
            return Cause(text, *_CLOCK, 0.8, finding="throttled" if bits == SLOWED_MASK else "")
    return None


def _check_retries(change: StepChange) -> Cause | None:
    samples = change.read_samples(change.process.allocator)
    if samples is None:
        return None
    flushes = int(samples[1].rows["retries"][-1]) - int(samples[0].rows["retries"][-1])
    if flushes < len(change.after):
        return None
    text = f"PyTorch's allocator had to flush its cache {flushes} times"
    return Cause(text, *_RETRY, 0.9, finding="allocator_retries")


def _check_cache_clearing(change: StepChange) -> Cause | None:
    """Reserved memory falls in each step: the script empties the cache, and each step asks the driver for memory anew."""
    samples = change.read_samples(change.process.allocator)
    if samples is None:
        return None
    falls = []
    for part, rows in zip(samples, (change.before, change.after), strict=True):
        reserved = part.rows["reserved_bytes"].astype(np.int64)
        falls.append(np.count_nonzero(-np.diff(reserved) >= _CLEARED_BYTES) / len(rows))
    if falls[0] > _FEW_SHARE or falls[1] < _MOST_SHARE:
        return None
    return Cause("the allocator's cache was emptied in each step", *_CLEARING, 0.9, where=BETWEEN, callee=EMPTY_CACHE)


def _check_collector(change: StepChange) -> Cause | None:
    """The garbage collector accounts for at least half of the time by which iterations became longer."""
    slower = float(np.median(change.after["iteration_s"]) - np.median(change.before["iteration_s"]))
    before, after = (measure_collecting(change.process, rows) for rows in (change.before, change.after))
    if slower <= 0 or after - before < slower / 2:
        return None
    text = f"Python's garbage collector takes {format_seconds(after)} of each iteration instead of {format_seconds(before)}"
    return Cause(text, *_COLLECTOR, 0.8)


def _check_crowding(change: StepChange) -> Cause | None:
    samples = change.read_samples(change.process.host_samples)
    if samples is None:
        return None
    before, after = (float(np.nan_to_num(part.rows["waiting_cores"]).mean()) for part in samples)
    if after < 1 or after < 2 * before:
        return None
    text = f"threads of the rank waited for {after:.1f} cores instead of {before:.1f}"
    return Cause(text, *_CORES, 0.7, finding="crowded_cores")


def _check_late_rank(change: StepChange) -> Cause | None:
    """Another rank's own work takes longer, and the lead waits for it where ranks synchronize."""
    slower = float(np.median(change.after["iteration_s"]) - np.median(change.before["iteration_s"]))
    known_ns, delays = int(change.after["end_unix_ns"][-1]), []
    for process in change.group.processes:
        rows = process.steps_until(known_ns)
        own = [compute_own_seconds(rows[_match_steps(rows, part)]) for part in (change.before, change.after)]
        if min(len(part) for part in own) > 0:
            delays.append((float(np.median(own[1]) - np.median(own[0])), process))
    if len(delays) < 2 or slower <= 0:
        return None
    (others, _), (late, culprit) = sorted(delays, key=lambda delay: delay[0])[-2:]
    if late - others < slower / 2 or culprit is change.process:
        return None
    text = f"rank {culprit.rank} began to arrive {format_seconds(late)} later where ranks synchronize"
    is_straggler = late >= max(STALL_SECONDS, STRAGGLER_SHARE * float(np.median(change.after["iteration_s"])))
    fix = f"py-spy dump --pid {culprit.source.pid}"
    return Cause(text, _LATE_ADVICE, fix, 0.85, has_own_finding=is_straggler, culprit=culprit, where=BETWEEN)


def _match_steps(rows: Rows, steps: Rows) -> slice:
    low, high = np.searchsorted(rows["step"], (steps["step"][0], steps["step"][-1] + 1))
    return slice(int(low), int(high))


def compute_own_seconds(rows: Rows) -> Floats:
    """Return the seconds of each step outside the phases in which ranks wait for each other: data, and between phases."""
    shared = rows["forward_s"] + rows["backward_s"] + rows["step_s"]
    return np.asarray(rows["iteration_s"] - shared, np.float64)


def measure_change_loads(change: StepChange) -> tuple[CoreLoad | None, CoreLoad | None]:
    """Return the load of the lead's node before and after."""
    recording, host = change.process.recording, change.process.host
    parts = ((int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])) for rows in (change.before, change.after))
    before, after = (measure_load(recording, host, *part) for part in parts)
    return before, after


def _check_others(change: StepChange) -> Cause | None:
    before, after = measure_change_loads(change)
    if before is None or after is None or not after.is_starved:
        return None
    if after.others - before.others < TAKEN_SHARE * after.cores:
        return None
    text = f"other processes used {after.others:.1f} of {after.cores} cores instead of {before.others:.1f}"
    return Cause(text, *_OTHERS, 0.8, finding="cores_taken")


def _check_neighbours(change: StepChange) -> Cause | None:
    """Another process that is on a rank's GPU may compute there: the phases that use the GPU take longer then."""
    begin_ns, end_ns = int(change.after["begin_unix_ns"][0]), int(change.after["end_unix_ns"][-1])
    own = compute_own_seconds(change.after), compute_own_seconds(change.before)
    slower = float(np.median(change.after["iteration_s"]) - np.median(change.before["iteration_s"]))
    if slower <= 0 or float(np.median(own[0]) - np.median(own[1])) > slower / 2:
        return None
    job_pids = {process.key for process in change.group.processes}
    for process in change.group.processes:
        host, gpu = process.gpu_key or ("", -1)
        rows = change.process.recording.get_records("gpu_processes", host, "gpu", gpu).read_window(begin_ns, end_ns).rows
        pids = set(rows["pid"][rows["used_bytes"] >= OTHERS_BYTES].tolist()) if len(rows) else set()
        # In a container NVML has the host's PIDs: then the job's processes cannot be recognized.
        others = [pid for pid in sorted(pids) if (host, pid) not in job_pids]
        if others and len(others) < len(pids):
            return Cause(
                f"process {others[0]} is on GPU {gpu} too", _NEIGHBOUR_ADVICE, f"ps -o user,lstart,cmd -p {others[0]}", 0.5
            )
    return None


def _check_slower_clock(change: StepChange) -> Cause | None:
    samples = change.read_samples(change.process.gpu_samples)
    if samples is None:
        return None
    before, after = (float(np.median(part.rows["sm_clock_mhz"])) for part in samples)
    # An unknown clock is NaN, which compares false.
    if not after < (1 - _CLOCK_SHARE) * before:
        return None
    return Cause(f"the SM clock fell from {before:.0f} to {after:.0f} MHz", *_CLOCK, 0.7)


def _check_growth(change: StepChange) -> Cause | None:
    """Resident memory grew by as much as a list may hold that each step iterates over."""
    before, after = int(change.before["host_rss_bytes"].min()), int(change.after["host_rss_bytes"].max())
    if before <= 0 or after - before < HOST_GROWTH_BYTES:
        return None
    text = Text("the lead rank's host memory grew by {grown:bytes}", {"grown": after - before})
    return Cause(text, *_GROWTH, 0.5, finding="host_growth")


def _check_interruption(change: StepChange) -> Cause | None:
    first = change.after[0]
    for column, name in (("checkpoint_s", "a checkpoint was saved"), ("eval_s", "an evaluation was run")):
        if first[column] > 0:
            return Cause(f"{name} just before", *_BREAKDOWN, 0.4)
    return None


_Check = Callable[[StepChange], Cause | None]
_CHECKS: tuple[_Check, ...] = (
    _check_skipping,
    _check_tokens,
    _check_data,
    _check_retries,
    _check_cache_clearing,
    _check_collector,
    _check_clocks,
    _check_others,
    _check_crowding,
    _check_late_rank,
    _check_neighbours,
    _check_interruption,
)
_DRIFT_CHECKS: tuple[_Check, ...] = (
    _check_tokens,
    _check_retries,
    _check_collector,
    _check_clocks,
    _check_slower_clock,
    _check_others,
    _check_crowding,
    _check_late_rank,
    _check_growth,
)
