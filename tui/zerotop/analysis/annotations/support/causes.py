"""What was recorded to have changed when iterations began to take another time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.annotations.pace.throttled import SLOWED_MASK
from zerotop.analysis.annotations.support.evidence import Group, Process, Records, Rows, Samples
from zerotop.analysis.annotations.support.host_load import CoreLoad, measure_load
from zerotop.analysis.annotations.support.thresholds import HOST_GROWTH_BYTES, TAKEN_SHARE
from zerotop.analysis.formatting import format_bytes, format_percent, format_seconds

_POWER_CAP = 0x04
# A sign is there when most samples show it, and was not when few did.
_MOST_SHARE, _FEW_SHARE = 0.5, 0.1
# A clock that falls by less is the usual up and down.
_CLOCK_SHARE = 0.05


class Cause(NamedTuple):
    """What changed, as the end of a sentence, and what to do."""

    text: str
    advice: str
    confidence: float


class StepChange(NamedTuple):
    """Steps of a group's lead before and after."""

    group: Group
    before: Rows
    after: Rows

    @property
    def process(self) -> Process:
        """Whose steps they are."""
        return self.group.lead


def find_cause(change: StepChange) -> Cause | None:
    """The surest that is recorded."""
    return next((found for look in _CHECKS if (found := look(change)) is not None), None)


def find_drift_cause(change: StepChange) -> Cause | None:
    """The surest that is recorded of what may change slowly."""
    return next((found for look in _DRIFT_CHECKS if (found := look(change)) is not None), None)


def _check_skipping(change: StepChange) -> Cause | None:
    before, after = float(change.before["skipped"].mean()), float(change.after["skipped"].mean())
    if before > _MOST_SHARE and after < _MOST_SHARE:
        advice = 'Set "fp16.initial_scale_power" lower: the first steps then take their true time.'
        return Cause("fp16 stopped skipping steps", advice, 0.95)
    if before < _FEW_SHARE and after > _MOST_SHARE:
        advice = 'Raise "fp16.loss_scale_window", or train in bf16: steps that are skipped teach nothing.'
        return Cause("fp16 began to skip steps", advice, 0.95)
    return None


def _check_tokens(change: StepChange) -> Cause | None:
    before, after = float(np.median(change.before["tokens"])), float(np.median(change.after["tokens"]))
    if min(before, after) <= 0:
        return None
    slower = np.log(np.median(change.after["iteration_s"]) / np.median(change.before["iteration_s"]))
    larger = np.log(after / before)
    if slower * larger <= 0 or abs(larger) < abs(slower) / 2:
        return None
    advice = "Group samples of like length (Trainer: group_by_length=True), so that batches take like time."
    return Cause(f"a rank's batches have {after:.0f} tokens instead of {before:.0f}", advice, 0.9)


def _check_clocks(change: StepChange) -> Cause | None:
    before, after = (
        _read_samples(change.process.gpu_samples, change.before),
        _read_samples(change.process.gpu_samples, change.after),
    )
    if not len(before) or not len(after):
        return None
    for bits, what in ((SLOWED_MASK, "the GPU slowed its clocks down"), (_POWER_CAP, "the GPU reached its power limit")):
        shares = [float(np.mean(samples.rows["throttle_reasons"] & bits != 0)) for samples in (before, after)]
        known = (before.rows["throttle_reasons"] >= 0).all() and (after.rows["throttle_reasons"] >= 0).all()
        if known and shares[0] < _FEW_SHARE and shares[1] > _MOST_SHARE:
            clock = float(np.median(after.rows["sm_clock_mhz"]))
            advice = "Look at nvidia-smi -q -d PERFORMANCE: cooling and power limits are out of DeepSpeed's reach."
            return Cause(f"{what} in {format_percent(shares[1])} of samples (SM clock {clock:.0f} MHz)", advice, 0.8)
    return None


def _check_retries(change: StepChange) -> Cause | None:
    samples = change.process.allocator
    before, after = _read_samples(samples, change.before), _read_samples(samples, change.after)
    if not len(before) or not len(after):
        return None
    flushes = int(after.rows["retries"][-1]) - int(before.rows["retries"][-1])
    if flushes < len(change.after):
        return None
    advice = "Start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or lower Trainer's per_device_train_batch_size."
    return Cause(f"PyTorch's allocator had to flush its cache {flushes} times", advice, 0.9)


def _check_crowding(change: StepChange) -> Cause | None:
    samples = change.process.host_samples
    before, after = _read_samples(samples, change.before), _read_samples(samples, change.after)
    if not len(before) or not len(after):
        return None
    waits = [float(np.nan_to_num(part.rows["waiting_cores"]).mean()) for part in (before, after)]
    if waits[1] < 1 or waits[1] < 2 * waits[0]:
        return None
    advice = "Start with deepspeed --bind_cores_to_rank, or set OMP_NUM_THREADS to the cores of each rank."
    return Cause(f"threads of the rank waited for {waits[1]:.1f} cores instead of {waits[0]:.1f}", advice, 0.7)


def _check_late_rank(change: StepChange) -> Cause | None:
    """Another rank's own work takes longer, for which the lead waits where ranks meet."""
    slower = float(np.median(change.after["iteration_s"]) - np.median(change.before["iteration_s"]))
    known_ns, found = int(change.after["end_unix_ns"][-1]), []
    for process in change.group.processes:
        rows = process.steps_until(known_ns)
        own = [compute_own_seconds(rows[_match_steps(rows, part)]) for part in (change.before, change.after)]
        if min(len(part) for part in own) > 0:
            found.append((float(np.median(own[1]) - np.median(own[0])), process.rank))
    if len(found) < 2 or slower <= 0:
        return None
    (others, _), (late, rank) = sorted(found)[-2:]
    if late - others < slower / 2 or rank == change.process.rank:
        return None
    return Cause(f"rank {rank} began to come {format_seconds(late)} later to where ranks meet", _LATE_ADVICE, 0.85)


_LATE_ADVICE = "Look at what that rank alone does between the phases, and at its data: raise dataloader_num_workers."


def _match_steps(rows: Rows, steps: Rows) -> slice:
    low, high = np.searchsorted(rows["step"], (steps["step"][0], steps["step"][-1] + 1))
    return slice(int(low), int(high))


def compute_own_seconds(rows: Rows) -> NDArray[np.float64]:
    """Seconds of each step outside the phases in which ranks wait for each other: data, and what lies between phases."""
    met = rows["forward_s"] + rows["backward_s"] + rows["step_s"]
    return np.asarray(rows["iteration_s"] - met, np.float64)


def measure_change_loads(change: StepChange) -> tuple[CoreLoad | None, CoreLoad | None]:
    """The lead's node before and after."""
    facts, host = change.process.facts, change.process.source.host
    parts = ((int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])) for rows in (change.before, change.after))
    before, after = (measure_load(facts, host, *part) for part in parts)
    return before, after


def _check_others(change: StepChange) -> Cause | None:
    before, after = measure_change_loads(change)
    if before is None or after is None or not after.is_starved:
        return None
    if after.others - before.others < TAKEN_SHARE * after.cores:
        return None
    text = f"other processes used {after.others:.1f} of {after.cores} cores instead of {before.others:.1f}"
    return Cause(text, "Look in top for what runs beside the job: ranks have to wait for cores.", 0.8)


def _check_slower_clock(change: StepChange) -> Cause | None:
    samples = change.process.gpu_samples
    before, after = _read_samples(samples, change.before), _read_samples(samples, change.after)
    if not len(before) or not len(after):
        return None
    clocks = [float(np.median(part.rows["sm_clock_mhz"])) for part in (before, after)]
    # Nothing is unknown here: NaN compares false.
    if not clocks[1] < (1 - _CLOCK_SHARE) * clocks[0]:
        return None
    advice = "Look at nvidia-smi -q -d PERFORMANCE: cooling and power limits are out of DeepSpeed's reach."
    return Cause(f"the SM clock fell from {clocks[0]:.0f} to {clocks[1]:.0f} MHz", advice, 0.7)


def _check_growth(change: StepChange) -> Cause | None:
    """More is resident, by as much as a list that is gone through in each step may hold."""
    was, becomes = int(change.before["host_rss_bytes"].min()), int(change.after["host_rss_bytes"].max())
    if was <= 0 or becomes - was < HOST_GROWTH_BYTES:
        return None
    advice = "Look for a list that grows with each step, and is gone through in each."
    return Cause(f"the lead rank's host memory grew by {format_bytes(becomes - was)}", advice, 0.5)


def _check_interruption(change: StepChange) -> Cause | None:
    first = change.after[0]
    for column, what in (("checkpoint_s", "a checkpoint was saved"), ("eval_s", "an evaluation was run")):
        if first[column] > 0:
            advice = 'Set "wall_clock_breakdown": true in the DeepSpeed config, to see which part takes longer since.'
            return Cause(f"{what} just before", advice, 0.4)
    return None


def _read_samples(samples: Records, rows: Rows) -> Samples:
    return samples.read_window(int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1]))


_Check = Callable[[StepChange], Cause | None]
_CHECKS: tuple[_Check, ...] = (
    _check_skipping,
    _check_tokens,
    _check_retries,
    _check_clocks,
    _check_others,
    _check_crowding,
    _check_late_rank,
    _check_interruption,
)
_DRIFT_CHECKS: tuple[_Check, ...] = (
    _check_tokens,
    _check_retries,
    _check_clocks,
    _check_slower_clock,
    _check_others,
    _check_crowding,
    _check_late_rank,
    _check_growth,
)
