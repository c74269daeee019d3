"""Calls of cudaMalloc and cudaFree by PyTorch's allocator: each stops the host, and cudaFree the GPU too."""

from __future__ import annotations

import numpy as np

from zerotop.analysis.findings.support.causes.step_change import Advice, Cause, StepChange, count_iterations
from zerotop.analysis.findings.support.evidence import Process, Rows, Samples
from zerotop.analysis.findings.support.lines.known_calls import EMPTY_CACHE
from zerotop.analysis.findings.support.lines.stack_lines import BETWEEN
from zerotop.analysis.findings.support.thresholds import FEW_SHARE, MOST_SHARE

# More calls in a step than settled training makes, and so few that it hardly notices them.
MANY_CALLS, _FEW = 1.0, 0.1
# Bytes of reserved memory returned to the driver at once: more than a segment or two.
_CLEARED_BYTES = 64 << 20
_EXPANDABLE = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
CALLING: Advice = ("Start with expandable segments: they grow instead of being allocated anew for each size.", _EXPANDABLE)
_CLEARING: Advice = (
    "Remove torch.cuda.empty_cache() from the loop: the step after it asks the driver for its memory again. Against"
    " fragmentation, use expandable segments.",
    _EXPANDABLE,
)


def _count_calls(change: StepChange, column: str) -> tuple[float, float] | None:
    """Return the calls in each step before and after; None if they were not recorded."""
    samples = change.read_samples(change.process.records("allocator"))
    if samples is None:
        return None
    before, after = (
        _count_in(part, column, count_iterations(rows))
        for part, rows in zip(samples, (change.before, change.after), strict=True)
    )
    return (before, after) if before is not None and after is not None else None


def _count_in(samples: Samples, column: str, steps: int) -> float | None:
    if column not in (samples.rows.dtype.names or ()):
        return None
    calls = samples.rows[column].astype(np.int64)
    if calls[0] < 0:
        return None
    # The first steps after a change allocate once what they need: calls in each step go on in the second half.
    middle = int(np.searchsorted(samples.times, (int(samples.times[0]) + int(samples.times[-1])) // 2))
    halves = int(calls[middle] - calls[0]), int(calls[-1] - calls[middle])
    return 2.0 * min(halves) / steps


def count_allocs(process: Process, steps: Rows) -> float | None:
    """Return how often steps call cudaMalloc on average; None if that was not recorded."""
    window = int(steps["begin_unix_ns"][0]), int(steps["end_unix_ns"][-1])
    samples = process.records("allocator").read_window(*window)
    if not len(samples) or "device_allocs" not in (samples.rows.dtype.names or ()) or samples.rows["device_allocs"][0] < 0:
        return None
    return (int(samples.rows["device_allocs"][-1]) - int(samples.rows["device_allocs"][0])) / count_iterations(steps)


def check_cache_clearing(change: StepChange) -> Cause | None:
    """Return the cause that the script empties the cache in each step, so that the next step asks the driver again."""
    if not _is_returned(change) and not _falls_each_step(change):
        return None
    calls = _count_calls(change, "device_allocs")
    called = f", and cudaMalloc called {calls[1]:.0f} times in each" if calls is not None and calls[1] >= MANY_CALLS else ""
    text = f"the allocator's cache was emptied in each step{called}"
    return Cause(text, *_CLEARING, 0.9, finding="cache_emptied", where=BETWEEN, callee=EMPTY_CACHE)


def _is_returned(change: StepChange) -> bool:
    """Whether each step began to call cudaFree. Unless memory is short, only an emptied cache causes that."""
    frees = _count_calls(change, "device_frees")
    return frees is not None and frees[0] <= _FEW and frees[1] >= MANY_CALLS


def _falls_each_step(change: StepChange) -> bool:
    """Whether reserved memory began to fall in each step."""
    samples = change.read_samples(change.process.records("allocator"))
    if samples is None:
        return False
    falls = []
    for part, rows in zip(samples, (change.before, change.after), strict=True):
        reserved = part.rows["reserved_bytes"].astype(np.int64)
        # The allocator is read at the end of a step with phases, and after counted ones.
        phased = max(1, int(np.count_nonzero(~rows["counted"])))
        falls.append(np.count_nonzero(-np.diff(reserved) >= _CLEARED_BYTES) / phased)
    return bool(falls[0] <= FEW_SHARE and falls[1] >= MOST_SHARE)


def check_allocator_calls(change: StepChange) -> Cause | None:
    """Return the cause that the allocator began to call cudaMalloc in each step."""
    calls = _count_calls(change, "device_allocs")
    if calls is None or calls[0] > _FEW or calls[1] < MANY_CALLS:
        return None
    return Cause(f"PyTorch's allocator called cudaMalloc {calls[1]:.0f} times in each step", *CALLING, 0.7)
