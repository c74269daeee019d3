"""The time of a step without any run: FLOPs by formula, and the share of a GPU's peak that other trainings reach."""

from __future__ import annotations

from dataclasses import dataclass

from zerotop.analysis.hardware.gpu_speeds import find_speeds, measure_mfu
from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.memory.expected.peak_moments import Workload
from zerotop.analysis.memory.expected.zero_model import EngineSetup

# Least, usual and most share of the dense 16-bit peak: of the tuned rows of `benchmarks/estimate_truths.jsonl` on A100s (1
# to 70 B, 2,048 tokens and more, one to four GPUs), of which 90 % are within, and around six recorded forwards on H200s that
# the GPU decides (0.26 to 0.38).
_SHARES = {"A100": (0.30, 0.59, 0.72), "H100": (0.22, 0.35, 0.60), "H200": (0.22, 0.35, 0.60)}
# Of a layer's forward and backward: below, the host's launches may take longer, which in ZeRO-3 are those of gathering, too
# (12 ms a layer of Qwen2 0.5 B on an H200).
_LEAST_LAYER_S, _LEAST_GATHERED_S = 0.005, 0.015


@dataclass(frozen=True, slots=True)
class EstimatedTime:
    """The least, likely and most seconds of a step, and its rates; or the reason why there is no figure."""

    seconds: tuple[float, float, float] | None
    tokens_per_s: float
    mfu: float
    reason: str = ""


def estimate_time(shape: ModelShape, setup: EngineSetup, work: Workload, gpu: str, nodes: int) -> EstimatedTime:
    """Return the time of one step of a training on GPUs of this type."""
    name = next((name for name in _SHARES if name in gpu.upper()), "")
    speeds = find_speeds(name)
    reason = _find_obstacle(shape, setup, nodes)
    if speeds is None:
        reason = f"Give --gpu with one of {', '.join(_SHARES)}, of which is known what trainings reach."
    if reason or speeds is None:
        return EstimatedTime(None, 0.0, 0.0, reason)
    flops = _count_flops(shape, setup, work)
    least, usual, most = (flops / (share * speeds.peak) for share in reversed(_SHARES[name]))
    is_gathered = setup.stage == 3 and not setup.is_loop
    if usual < (_LEAST_GATHERED_S if is_gathered else _LEAST_LAYER_S) * shape.layers:
        reason = (
            "So few tokens that the host's launches may decide: record a few steps, or give more rows or a longer sequence."
        )
        return EstimatedTime(None, 0.0, 0.0, reason)
    rate = work.tokens * setup.ranks / usual
    mfu = measure_mfu(rate, setup.parameters, setup.trainable, setup.ranks, [name], "bf16", "")
    count = work.accumulation
    return EstimatedTime((count * least, count * usual, count * most), rate, mfu)


def _find_obstacle(shape: ModelShape, setup: EngineSetup, nodes: int) -> str:
    """Return why the time is not known, as a sentence; "" if it is."""
    ask = "record a few steps of any setting, and ask what-if"
    if setup.offload_optimizer != "none" or setup.offload_parameters != "none":
        return f"The speeds of the CPUs and of the transfers decide with offload: {ask}."
    if nodes > 1:
        return f"The connection of the nodes was not measured: {ask}."
    if setup.computes_wide:
        return f"Whether fp32 computes in TF32 is not known: {ask}."
    if shape.counted is None or shape.vision or shape.counted.linears["down_proj"][2] > 1:
        return f"The FLOPs of a token are counted for dense language models of known families alone: {ask}."
    return ""


def _count_flops(shape: ModelShape, setup: EngineSetup, work: Workload) -> float:
    """Return the FLOPs of a micro-batch: 2 for each parameter and token forward, 2 or 4 backward, 2 again if recomputed.

    A token of a sequence of s takes 2 s h more in each layer's forward, as half of attention's products is masked.
    """
    attention = work.sequence * shape.hidden * shape.layers
    passes = 3 if work.checkpointing == "full" else 2
    return work.tokens * 2.0 * (passes * (setup.parameters + attention) + setup.trainable + attention)
