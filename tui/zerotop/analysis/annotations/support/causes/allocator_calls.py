"""Calls of cudaMalloc by PyTorch's allocator: each stops the host, and cudaFree the GPU too."""

from __future__ import annotations

from zerotop.analysis.annotations.support.causes.step_change import Cause, StepChange, count_iterations
from zerotop.analysis.annotations.support.evidence import Samples

# Calls in a step that settled training does not make, and those that it hardly notices.
_MANY, _FEW = 1.0, 0.1
_ADVICE = "Start with expandable segments: they grow instead of being allocated anew for each size."
_FIX = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def count_calls(change: StepChange) -> tuple[float, float] | None:
    """Return the calls of cudaMalloc in each step before and after; None where they are not recorded."""
    samples = change.read_samples(change.process.allocator)
    if samples is None:
        return None
    before, after = (
        _count_calls(part, count_iterations(rows)) for part, rows in zip(samples, (change.before, change.after), strict=True)
    )
    return (before, after) if before is not None and after is not None else None


def _count_calls(samples: Samples, steps: int) -> float | None:
    if "device_allocs" not in (samples.rows.dtype.names or ()):
        return None
    calls = samples.rows["device_allocs"]
    return float(calls[-1] - calls[0]) / steps if calls[0] >= 0 else None


def describe_calls(change: StepChange) -> str:
    """Return the calls after the change as the end of a sentence; empty where there are none, or they are not recorded."""
    calls = count_calls(change)
    return f", and cudaMalloc called {calls[1]:.0f} times in each" if calls is not None and calls[1] >= _MANY else ""


def check_allocator_calls(change: StepChange) -> Cause | None:
    """Return the cause that the allocator began to call cudaMalloc in each step."""
    calls = count_calls(change)
    if calls is None or calls[0] > _FEW or calls[1] < _MANY:
        return None
    return Cause(f"PyTorch's allocator called cudaMalloc {calls[1]:.0f} times in each step", _ADVICE, _FIX, 0.7)
