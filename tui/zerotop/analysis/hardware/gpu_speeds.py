"""The speeds of types of GPUs, and which share of its peak a training reaches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import nan


@dataclass(frozen=True, slots=True)
class GpuSpeeds:
    """A type of GPU: NVIDIA's data sheets, but for the last."""

    peak: float  # dense 16-bit FLOP/s
    fp32_peak: float  # without TF32
    memory: float  # B/s
    # B/s of NCCL's bus among GPUs of a node ("busbw" of nccl-tests); None without NVLink. 277 GB/s measured for the 16 GB
    # that ZeRO-2 gathers after an update on four H200s; others by the ratio of NVLink.
    link: float | None


_SPEEDS = {
    "H100": GpuSpeeds(989e12, 67e12, 3.35e12, 280e9),
    "H200": GpuSpeeds(989e12, 67e12, 4.8e12, 280e9),
    "A100": GpuSpeeds(312e12, 19.5e12, 2.0e12, 190e9),
    "B200": GpuSpeeds(2250e12, 75e12, 8e12, 560e9),
    "L40S": GpuSpeeds(362e12, 92e12, 0.86e12, None),
    "V100": GpuSpeeds(125e12, 15.7e12, 0.9e12, 95e9),
}
_EXPERTS = ("moe", "mixtral", "expert")


def find_speeds(gpu: str) -> GpuSpeeds | None:
    """Return the speeds of a GPU by its product name; None for a type that is not known."""
    return next((speeds for name, speeds in _SPEEDS.items() if name in gpu.upper()), None)


def measure_mfu(
    tokens_per_s: float,
    parameters: int | None,
    trained: int | None,
    count: int | None,
    gpus: Collection[str],
    dtype: str,
    model: str,
) -> float:
    """Return the model FLOPs utilization: FLOPs of the formula by the peak of ``count`` GPUs; NaN where it is not known.

    2 FLOPs of the forward for each parameter and token, 2 of the backward, and 2 more if the parameter is trained (Chowdhery
    et al., arXiv:2204.02311, appendix B, without attention's s x s products). What is computed twice counts once. Fp32 may
    be TF32, and a token uses some experts only: of these there is no figure.
    """
    speeds = {find_speeds(gpu) for gpu in gpus}
    found = next(iter(speeds)) if len(speeds) == 1 else None
    has_experts = any(name in model.lower() for name in _EXPERTS)
    if found is None or not parameters or not count or dtype not in ("bf16", "fp16") or has_experts:
        return nan
    flops = 4 * parameters + 2 * (parameters if trained is None else trained)
    return tokens_per_s * flops / (count * found.peak)
