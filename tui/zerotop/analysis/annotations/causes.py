"""What was recorded to have changed when iterations began to take another time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from zerotop.analysis.annotations.facts import Process, Records, Rows, Samples
from zerotop.analysis.annotations.words import percent

# NVML's reasons that slow a GPU down against its will: hardware slowdown, software thermal, hardware thermal, power brake.
_SLOWED = 0x08 | 0x20 | 0x40 | 0x80
_POWER_CAP = 0x04
# A sign is there when most samples show it, and was not when few did.
_MOST, _FEW = 0.5, 0.1


class Cause(NamedTuple):
    """What changed, as the end of a sentence, and what to do."""

    text: str
    advice: str
    confidence: float


class Change(NamedTuple):
    """The steps before and after, of the process whose they are."""

    process: Process
    before: Rows
    after: Rows


def cause_of(change: Change) -> Cause | None:
    """The surest that is recorded."""
    for look in _LOOKS:
        found = look(change)
        if found is not None:
            return found
    return None


def _skipping(change: Change) -> Cause | None:
    before, after = float(change.before["skipped"].mean()), float(change.after["skipped"].mean())
    if before > _MOST and after < _MOST:
        advice = 'Set "fp16.initial_scale_power" lower: the first steps then take their true time.'
        return Cause("fp16 stopped skipping steps", advice, 0.95)
    if before < _FEW and after > _MOST:
        advice = 'Raise "fp16.loss_scale_window", or train in bf16: steps that are skipped teach nothing.'
        return Cause("fp16 began to skip steps", advice, 0.95)
    return None


def _tokens(change: Change) -> Cause | None:
    before, after = float(np.median(change.before["tokens"])), float(np.median(change.after["tokens"]))
    if min(before, after) <= 0:
        return None
    slower = np.log(np.median(change.after["iteration_s"]) / np.median(change.before["iteration_s"]))
    larger = np.log(after / before)
    if slower * larger <= 0 or abs(larger) < abs(slower) / 2:
        return None
    advice = "Group samples of like length (Trainer: group_by_length=True), so that batches take like time."
    return Cause(f"a rank's batches have {after:.0f} tokens instead of {before:.0f}", advice, 0.9)


def _clocks(change: Change) -> Cause | None:
    before, after = _samples(change.process.gpu_samples, change.before), _samples(change.process.gpu_samples, change.after)
    if not len(before) or not len(after):
        return None
    for bits, what in ((_SLOWED, "the GPU slowed its clocks down"), (_POWER_CAP, "the GPU reached its power limit")):
        shares = [float(np.mean(samples.rows["throttle_reasons"] & bits != 0)) for samples in (before, after)]
        known = (before.rows["throttle_reasons"] >= 0).all() and (after.rows["throttle_reasons"] >= 0).all()
        if known and shares[0] < _FEW and shares[1] > _MOST:
            clock = float(np.median(after.rows["sm_clock_mhz"]))
            advice = "Look at nvidia-smi -q -d PERFORMANCE: cooling and power limits are out of DeepSpeed's reach."
            return Cause(f"{what} in {percent(shares[1])} of samples (SM clock {clock:.0f} MHz)", advice, 0.8)
    return None


def _retries(change: Change) -> Cause | None:
    samples = change.process.allocator
    before, after = _samples(samples, change.before), _samples(samples, change.after)
    if not len(before) or not len(after):
        return None
    flushes = int(after.rows["retries"][-1]) - int(before.rows["retries"][-1])
    if flushes < len(change.after):
        return None
    advice = "Start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or lower Trainer's per_device_train_batch_size."
    return Cause(f"PyTorch's allocator had to flush its cache {flushes} times", advice, 0.9)


def _crowding(change: Change) -> Cause | None:
    samples = change.process.host_samples
    before, after = _samples(samples, change.before), _samples(samples, change.after)
    if not len(before) or not len(after):
        return None
    waits = [float(np.nan_to_num(part.rows["waiting_cores"]).mean()) for part in (before, after)]
    if waits[1] < 1 or waits[1] < 2 * waits[0]:
        return None
    advice = "Start with deepspeed --bind_cores_to_rank, or set OMP_NUM_THREADS to the cores of each rank."
    return Cause(f"threads of the rank waited for {waits[1]:.1f} cores instead of {waits[0]:.1f}", advice, 0.7)


def _interruption(change: Change) -> Cause | None:
    first = change.after[0]
    for column, what in (("checkpoint_s", "a checkpoint was saved"), ("eval_s", "an evaluation was run")):
        if first[column] > 0:
            advice = 'Set "wall_clock_breakdown": true in the DeepSpeed config, to see which part takes longer since.'
            return Cause(f"{what} just before", advice, 0.4)
    return None


def _samples(samples: Records, rows: Rows) -> Samples:
    return samples.within(int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1]))


_LOOKS: tuple[Callable[[Change], Cause | None], ...] = (_skipping, _tokens, _retries, _clocks, _crowding, _interruption)
