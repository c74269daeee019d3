"""Advice for a job without enough memory."""

from __future__ import annotations

from typing import NamedTuple

from zerotop.analysis.engine import LOOP
from zerotop.analysis.failures.oom_evidence import NOTABLE_SHARE, OomCase, put_size
from zerotop.analysis.memory.expected.zero_model import UPDATE_PHASES
from zerotop.analysis.script_terms import read_terms
from zerotop_probe.recording.events import EngineFacts


class Advice(NamedTuple):
    """A measure against a lack of memory."""

    text: str  # a sentence
    setting: str  # the name of the setting in it
    fix: str  # what to copy into the script, its configuration or a shell; empty if that is not known


_OFFLOAD_OPTIMIZER = "zero_optimization.offload_optimizer.device"
_OFFLOAD_PARAMETERS = "zero_optimization.offload_param.device"
_ZERO_INIT = Advice(
    "Construct the model under deepspeed.zero.Init, so that no rank holds all of it.",
    "deepspeed.zero.Init",
    "with deepspeed.zero.Init(config_dict_or_path=config):",
)
_STAGE_3_FIX = '"zero_optimization": {"stage": 3}'
_STAGE_3 = Advice("Partition the parameters too: zero_optimization.stage 3.", "zero_optimization.stage", _STAGE_3_FIX)
_STATE_ON_HOST_FIX = "state = {name: value.cpu() for name, value in model.state_dict().items()}"
_LARGER_THAN_GPU = Advice(
    "No setting makes room for it: this single request is larger than the GPU. Look at the sizes of the tensors.",
    "sizes",
    "",
)
_NVME = '{"device": "nvme", "nvme_path": "/local_nvme"}'


def advise_on_gpu(case: OomCase) -> Advice:
    """Return the advice for a GPU without enough memory."""
    engine, limit = case.engine, case.limit_bytes
    if limit is not None and (case.requested_bytes or 0) > limit:
        return _LARGER_THAN_GPU
    if engine.kind == LOOP:
        return _advise_loop(case, engine)
    if case.outer_phase == "init":
        return _advise_at_start(engine)
    if case.outer_phase == "checkpoint_save":
        name = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        fix = f'"{name.rpartition(".")[2]}": false'
        return Advice(f"Save without gathering the weights on the GPU: {name} false.", name, fix)
    mostly_states = case.model_states_bytes is not None and limit is not None and case.model_states_bytes > limit // 2
    if case.outer_phase in UPDATE_PHASES or mostly_states:
        smaller = advise_keeping_less(engine)
        if smaller is not None:
            return smaller
    rows = engine.micro_batch
    if isinstance(rows, int) and rows > 1:
        name = "train_micro_batch_size_per_gpu"
        halved = f"Halve {name}, now {rows}, and double gradient_accumulation_steps."
        return Advice(halved, name, read_terms(engine)["smaller_batch_fix"])
    if engine.activation_checkpointing is False:
        return _advise_recomputing(engine)
    return advise_keeping_less(engine) or _advise_shorter("Train with shorter sequences, or on more GPUs.", case)


def _advise_loop(case: OomCase, engine: EngineFacts) -> Advice:
    """Return the advice for a loop without DeepSpeed."""
    if case.outer_phase == "checkpoint_save":
        return Advice(
            "Move the state to the host before saving: torch.save() of tensors on the CPU.", "torch.save", _STATE_ON_HOST_FIX
        )
    if case.rows is not None and case.rows > 1:
        name = read_terms(engine)["batch_size"]
        halved = f"Halve {name}, now {case.rows}, and accumulate gradients over twice as many micro-batches."
        return Advice(halved, name, f"{name.rpartition(' ')[2]}={case.rows // 2}")
    if engine.activation_checkpointing is False:
        return _advise_recomputing(engine)
    text = "Train with shorter sequences, or divide the model among GPUs: FSDP, or DeepSpeed's ZeRO."
    shorter = _advise_shorter(text, case)
    return shorter._replace(setting="sequence length", fix=shorter.fix or "fully_shard(model)")


def _advise_recomputing(engine: EngineFacts) -> Advice:
    fix = read_terms(engine)["recompute_fix"]
    return Advice(f"Recompute activations: {fix}.", "activation checkpointing", fix)


def _advise_shorter(text: str, case: OomCase) -> Advice:
    halved = case.sequence // 2 if case.sequence is not None and case.sequence > 1 else None
    return Advice(text, "max_seq_length", f"truncation=True, max_length={halved}" if halved else "")


def _advise_at_start(engine: EngineFacts) -> Advice:
    if (engine.zero_stage or 0) < 3:
        return _STAGE_3._replace(text="Partition the parameters: zero_optimization.stage 3.")
    return _advise_parameter_offload(engine) or _ZERO_INIT


def advise_keeping_less(engine: EngineFacts) -> Advice | None:
    """Return advice that makes the model states smaller; None if the stage is unknown, or nothing is left to do."""
    stage = engine.zero_stage
    if not isinstance(stage, int):
        return None
    if engine.offload_optimizer in (None, "none"):
        stage_2, device = ("", " with zero_optimization.stage 2")[not stage], '"offload_optimizer": {"device": "cpu"}'
        fix = device if stage else f'"zero_optimization": {{"stage": 2, {device}}}'
        return Advice(f"Offload the optimizer to host memory: {_OFFLOAD_OPTIMIZER} cpu{stage_2}.", _OFFLOAD_OPTIMIZER, fix)
    return _STAGE_3 if stage < 3 else _advise_parameter_offload(engine)


def _advise_parameter_offload(engine: EngineFacts) -> Advice | None:
    if engine.offload_parameters in (None, "none"):
        text = f"Offload the parameters to host memory: {_OFFLOAD_PARAMETERS} cpu."
        return Advice(text, _OFFLOAD_PARAMETERS, '"offload_param": {"device": "cpu"}')
    return None


def advise_on_host(case: OomCase) -> Advice:
    """Return the advice for a host without enough memory."""
    offloads = case.engine.offload_optimizer, case.engine.offload_parameters
    if "cpu" in offloads and case.pinned_spare_bytes > NOTABLE_SHARE * (case.limit_bytes or case.host_used_bytes or 1):
        name = "zero_optimization.offload_optimizer.pin_memory"
        text = f"Pinned memory wastes {put_size(case.pinned_spare_bytes)} by rounding up to powers of two: {name} false."
        return Advice(text, name, '"offload_optimizer": {"device": "cpu", "pin_memory": false}')
    if offloads[0] == "cpu":
        text = f"Move the optimizer state to NVMe ({_OFFLOAD_OPTIMIZER} nvme), or run fewer ranks on a node."
        return Advice(text, _OFFLOAD_OPTIMIZER, f'"offload_optimizer": {_NVME}')
    if offloads[1] == "cpu":
        text = f"Move the parameters to NVMe ({_OFFLOAD_PARAMETERS} nvme), or run fewer ranks on a node."
        return Advice(text, _OFFLOAD_PARAMETERS, f'"offload_param": {_NVME}')
    if case.outer_phase in ("init", "") and not case.has_begun and case.engine.kind != LOOP:
        return _ZERO_INIT
    if not case.has_workers:
        return Advice("Give the job more host memory, or let it keep less there.", "", "")
    text = f"Give the job more host memory, or lower {read_terms(case.engine)['worker_count']}."
    return Advice(text, "num_workers", read_terms(case.engine)["fewer_workers_fix"])
