"""Advice for a job without enough memory: a sentence, and the setting that it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerotop.analysis.engine import LOOP
from zerotop.analysis.failures.oom_evidence import NOTABLE_SHARE, OomCase, put_size
from zerotop.analysis.memory.expected.zero_model import UPDATE_PHASES
from zerotop.analysis.script_terms import read_terms

_ZERO_INIT = "Construct the model under deepspeed.zero.Init, so that no rank holds all of it.", "deepspeed.zero.Init"
_OFFLOAD_OPTIMIZER = "zero_optimization.offload_optimizer.device"
_OFFLOAD_PARAMETERS = "zero_optimization.offload_param.device"


def advise_on_gpu(case: OomCase) -> tuple[str, str]:
    """Return (advice, setting) for a GPU without enough memory."""
    engine, limit = case.engine, case.limit_bytes
    if engine.get("kind") == LOOP:
        return _advise_loop(case, engine)
    if case.outer_phase == "init":
        return _advise_at_start(engine)
    if case.outer_phase == "checkpoint_save":
        name = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        return f"Save without gathering the weights on the GPU: {name} false.", name
    mostly_states = case.model_states_bytes is not None and limit is not None and case.model_states_bytes > limit // 2
    if case.outer_phase in UPDATE_PHASES or mostly_states:
        smaller = advise_keeping_less(engine)
        if smaller is not None:
            return smaller
    if isinstance(engine.get("micro_batch"), int) and engine["micro_batch"] > 1:
        name = "train_micro_batch_size_per_gpu"
        return f"Halve {name}, now {engine['micro_batch']}, and double gradient_accumulation_steps.", name
    if engine.get("activation_checkpointing") is False:
        return f"Recompute activations: {read_terms(engine)['recompute_fix']}.", "activation checkpointing"
    return advise_keeping_less(engine) or ("Train with shorter sequences, or on more GPUs.", "max_seq_length")


def _advise_loop(case: OomCase, engine: Mapping[str, Any]) -> tuple[str, str]:
    """Return (advice, setting) for a loop without DeepSpeed."""
    terms = read_terms(engine)
    if case.outer_phase == "checkpoint_save":
        return "Move the state to the host before saving: torch.save() of tensors on the CPU.", "torch.save"
    if case.rows is not None and case.rows > 1:
        name = terms["batch_size"]
        return f"Halve {name}, now {case.rows}, and accumulate gradients over twice as many micro-batches.", name
    if engine.get("activation_checkpointing") is False:
        return f"Recompute activations: {terms['recompute_fix']}.", "activation checkpointing"
    return "Train with shorter sequences, or divide the model among GPUs: FSDP, or DeepSpeed's ZeRO.", "sequence length"


def _advise_at_start(engine: Mapping[str, Any]) -> tuple[str, str]:
    if (engine.get("zero_stage") or 0) < 3:
        return "Partition the parameters: zero_optimization.stage 3.", "zero_optimization.stage"
    return _advise_parameter_offload(engine) or _ZERO_INIT


def advise_keeping_less(engine: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return advice that makes the model states smaller; None if the stage is unknown, or nothing is left to do."""
    stage = engine.get("zero_stage")
    if not isinstance(stage, int):
        return None
    if engine.get("offload_optimizer") in (None, "none"):
        stage_2 = "" if stage else " with zero_optimization.stage 2"
        return f"Offload the optimizer to host memory: {_OFFLOAD_OPTIMIZER} cpu{stage_2}.", _OFFLOAD_OPTIMIZER
    if stage < 3:
        return "Partition the parameters too: zero_optimization.stage 3.", "zero_optimization.stage"
    return _advise_parameter_offload(engine)


def _advise_parameter_offload(engine: Mapping[str, Any]) -> tuple[str, str] | None:
    if engine.get("offload_parameters") in (None, "none"):
        return f"Offload the parameters to host memory: {_OFFLOAD_PARAMETERS} cpu.", _OFFLOAD_PARAMETERS
    return None


def advise_on_host(case: OomCase) -> tuple[str, str]:
    """Return (advice, setting) for a host without enough memory."""
    offloads = case.engine.get("offload_optimizer"), case.engine.get("offload_parameters")
    if "cpu" in offloads and case.pinned_spare_bytes > NOTABLE_SHARE * (case.limit_bytes or case.host_used_bytes or 1):
        name = "zero_optimization.offload_optimizer.pin_memory"
        spare = put_size(case.pinned_spare_bytes)
        return f"Pinned memory wastes {spare} by rounding up to powers of two: {name} false.", name
    if offloads[0] == "cpu":
        advice = f"Move the optimizer state to NVMe ({_OFFLOAD_OPTIMIZER} nvme), or run fewer ranks on a node."
        return advice, _OFFLOAD_OPTIMIZER
    if offloads[1] == "cpu":
        advice = f"Move the parameters to NVMe ({_OFFLOAD_PARAMETERS} nvme), or run fewer ranks on a node."
        return advice, _OFFLOAD_PARAMETERS
    if case.outer_phase in ("init", "") and case.engine.get("kind") != LOOP:
        return _ZERO_INIT
    return f"Give the job more host memory, or lower {read_terms(case.engine)['worker_count']}.", "num_workers"
