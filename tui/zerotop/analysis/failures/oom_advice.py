"""What to make smaller where there was not enough memory: advice as a sentence, and the setting that it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerotop.analysis.failures.oom_evidence import NOTABLE_SHARE, OomCase, format_size

_UPDATE = ("step", "optimizer", "cpu_optimizer", "grads_to_cpu", "params_to_gpu", "allgather")


def advise_on_gpu(case: OomCase) -> tuple[str, str]:
    """What to make smaller: advice, setting."""
    engine = case.engine
    if case.phase == "init":
        return _advise_at_start(engine)
    if case.phase == "checkpoint_save":
        name = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        return f"Save without gathering the weights on the GPU: {name} false.", name
    kept_most = case.model_states is not None and case.limit is not None and case.model_states > case.limit // 2
    if case.phase in _UPDATE or kept_most:
        smaller = advise_keeping_less(engine)
        if smaller is not None:
            return smaller
    if isinstance(engine.get("micro_batch"), int) and engine["micro_batch"] > 1:
        name = "train_micro_batch_size_per_gpu"
        return f"Halve {name}, now {engine['micro_batch']}, and double gradient_accumulation_steps.", name
    if engine.get("activation_checkpointing") is False:
        return "Recompute activations: gradient_checkpointing in the Trainer's arguments.", "gradient_checkpointing"
    return advise_keeping_less(engine) or ("Train with shorter sequences, or on more GPUs.", "max_seq_length")


def _advise_at_start(engine: Mapping[str, Any]) -> tuple[str, str]:
    if (engine.get("zero_stage") or 0) < 3:
        return "Partition the parameters: zero_optimization.stage 3.", "zero_optimization.stage"
    if engine.get("offload_parameters") in (None, "none"):
        name = "zero_optimization.offload_param.device"
        return f"Keep the parameters in host memory: {name} cpu.", name
    return "Make the model under deepspeed.zero.Init, so that no rank holds all of it.", "deepspeed.zero.Init"


def advise_keeping_less(engine: Mapping[str, Any]) -> tuple[str, str] | None:
    """What makes parameters, gradients and state smaller on the GPU; None where all of it has been done, or nobody knows."""
    stage = engine.get("zero_stage")
    if not isinstance(stage, int):
        return None
    if engine.get("offload_optimizer") in (None, "none"):
        name = "zero_optimization.offload_optimizer.device"
        beside = "" if stage else " with zero_optimization.stage 2"
        return f"Keep the optimizer in host memory: {name} cpu{beside}.", name
    if stage < 3:
        return "Partition the parameters too: zero_optimization.stage 3.", "zero_optimization.stage"
    if engine.get("offload_parameters") in (None, "none"):
        name = "zero_optimization.offload_param.device"
        return f"Keep the parameters in host memory: {name} cpu.", name
    return None


def advise_on_host(case: OomCase) -> tuple[str, str]:
    engine = case.engine
    offloads = engine.get("offload_optimizer"), engine.get("offload_parameters")
    if "cpu" in offloads and case.pinned_spare > NOTABLE_SHARE * (case.limit or case.host_used or 1):
        name = "zero_optimization.offload_optimizer.pin_memory"
        advice = f"{format_size(case.pinned_spare)} are lost to pinned memory's rounding up to powers of two: {name} false."
        return advice, name
    if offloads[0] == "cpu":
        name = "zero_optimization.offload_optimizer.device"
        return f"Move the optimizer's state to NVMe ({name} nvme), or run fewer ranks on a node.", name
    if offloads[1] == "cpu":
        name = "zero_optimization.offload_param.device"
        return f"Move the parameters to NVMe ({name} nvme), or run fewer ranks on a node.", name
    if case.phase in ("init", ""):
        return "Make the model under deepspeed.zero.Init, so that no rank holds all of it.", "deepspeed.zero.Init"
    return "Give the job more host memory, or load data with a smaller dataloader_num_workers.", "dataloader_num_workers"
