"""Read the facts of a DeepSpeed engine, once, without collectives, through methods that all versions share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

from zerotop_probe.inside.device import tensor_inventory
from zerotop_probe.inside.device.allocator import find_backend
from zerotop_probe.inside.engines import EngineState, TrainingState
from zerotop_probe.inside.guard import now
from zerotop_probe.inside.inspection import optimizer_facts
from zerotop_probe.inside.probe import Probe, find_ordinal
from zerotop_probe.recording import events, redact
from zerotop_probe.recording.event_values import DIMENSIONS, FAILURE
from zerotop_probe.recording.interruptions import is_interruption

PARAMETER_COUNTS = ("parameters", "trainable_parameters", "rank_parameters")
_ERROR_LENGTH = 200
# Moments at which blocks in no category are those of the step in progress, whoever else holds some.
_WITHIN_STEP = ("before_forward", "before_backward", "before_update", FAILURE)


def record_engine(probe: Probe, state: EngineState, engine: Any) -> None:
    """Record the ``engine`` event, and the planned steps if the configuration contains them."""
    facts = read_engine_facts(engine)
    state.uses_loss_scale = facts["dtype"] == "fp16" or facts["autocast"] == "fp16"
    state.offloads_optimizer = facts["offload_optimizer"] not in (None, "none")
    state.offloads_parameters = facts["offload_parameters"] not in (None, "none")
    state.has_optimizer = bool(facts["optimizer"])
    probe.watch_device(find_ordinal(getattr(engine, "device", None)))
    if probe.recorder is None:
        return
    probe.recorder.write_event(now(), events.Engine, engine=state.index, **facts)
    if not state.index:
        _watch_engine(probe, state)
    steps = find_planned_steps(facts["config"])
    if steps is not None:
        probe.recorder.write_event(now(), events.TotalSteps, steps=steps, source="config")


def _watch_engine(probe: Probe, state: EngineState) -> None:
    """Let the probe look for changes of an engine's model and optimizer."""

    def list_parts() -> tuple[list[Any], list[Any]]:
        engine = state.reference()
        inner = getattr(engine, "basic_optimizer", None)
        return ([engine.module], [inner] if inner is not None else []) if engine is not None else ([], [])

    def count(when: str, step: int) -> None:
        engine = state.reference()
        if engine is not None:
            write_tensors(probe, state, when, engine.device, lambda: tensor_inventory.build_inventory(engine), step)

    probe.watch.list_parts, probe.watch.count_tensors = list_parts, count


def record_tensors(probe: Probe, state: EngineState, engine: Any, when: str) -> None:
    """Record the ``tensors`` event of that moment, once."""
    write_tensors(probe, state, when, engine.device, lambda: tensor_inventory.build_inventory(engine))


def write_tensors(
    probe: Probe,
    state: TrainingState,
    when: str,
    device: Any,
    build: Callable[[], tensor_inventory.Inventory],
    step: int | None = None,
    **more: Any,
) -> None:
    """Record the ``tensors`` event of that moment, once unless it has a ``step``, with ``more`` facts.

    ``build`` makes the inventory of tensors on ``device``.
    """
    if probe.recorder is None or when in state.recorded_inventories:
        return
    if step is None:
        state.recorded_inventories.add(when)
        step = state.finished_steps
    time_ns = now()
    find_held = probe.watch.find_held if when not in _WITHIN_STEP else None
    facts = more | tensor_inventory.build_facts(build, find_ordinal(device), find_held)
    if facts.get("contexts") and (place := probe.watch.find_loading_line()) is not None:
        facts["context_line"] = place._asdict()
    probe.recorder.write_event(time_ns, events.Tensors, engine=state.index, step=step, when=when, **facts)


def read_engine_facts(engine: Any) -> dict[str, Any]:
    """Return the facts of the ``engine`` event. A fact that cannot be read is None; ``unread`` has the error."""
    facts = read_facts(engine, _FACT_READERS)
    facts["config"] = redact.redact_tree(facts["config"] or {})
    return facts


def read_facts(subject: Any, readers: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Return a fact for each reader; ``parameters`` reads several, by the names of :data:`PARAMETER_COUNTS`."""
    facts: dict[str, Any] = {}
    unread: dict[str, str] = {}
    for name, read in readers.items():
        try:
            facts[name] = read(subject)
        except Exception as error:  # the other facts are recorded all the same
            if is_interruption(error):
                raise
            facts[name] = None
            unread[name] = redact.redact_text(f"{type(error).__name__}: {error}")[:_ERROR_LENGTH]
    parameters = facts.pop("parameters") or dict.fromkeys(PARAMETER_COUNTS)
    return {**facts, **parameters, "devices": facts["devices"] or [], "unread": unread}


def find_planned_steps(config: dict[str, Any]) -> int | None:
    """Return the number of optimizer steps of the configuration's scheduler, or None."""
    steps = _try_read(lambda: config["scheduler"]["params"]["total_num_steps"])
    return steps if isinstance(steps, int) and steps > 0 else None


def _try_read(read: Callable[[], Any]) -> Any:
    """Return None if this version of DeepSpeed names it differently or lacks it."""
    try:
        return read()
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if is_interruption(error):
            raise
        return None


def _get_class_name(value: Any) -> str:
    # An engine without an optimizer has None, or a placeholder that only partitions parameters.
    name = "" if value is None else type(value).__name__
    return "" if name in ("DummyOptim", "DeepSpeedZeRoOffload") else name


def _format_offload(configuration: Any) -> str:
    return "none" if configuration is None else str(getattr(configuration.device, "value", configuration.device))


def _read_dtype(engine: Any) -> str | None:
    if _try_read(lambda: bool(engine.fp16_enabled())):
        return "fp16"
    return "bf16" if _try_read(lambda: bool(engine.bfloat16_enabled())) else "fp32"


def _read_autocast(engine: Any) -> str | None:
    """Return the dtype of torch.autocast if DeepSpeed's configuration enables it, else None."""
    if not _try_read(lambda: bool(engine.torch_autocast_enabled())):
        return None
    name = str(_try_read(engine.torch_autocast_dtype))
    return {"torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(name, name)


def _count_parameters(engine: Any) -> dict[str, int]:
    """Return the elements of all parameters, of the trainable ones, and of those that this rank stores.

    ZeRO stage 3 leaves empty tensors in the module, with the true size and this rank's partition as attributes.
    """
    total = trainable = stored = 0
    for parameter in engine.module.parameters():
        whole = getattr(parameter, "ds_numel", None)
        size = int(parameter.numel() if whole is None else whole)
        share = getattr(parameter, "ds_tensor", None)
        total += size
        trainable += size if parameter.requires_grad else 0
        stored += size if share is None else int(share.numel())
    return dict(zip(PARAMETER_COUNTS, (total, trainable, stored)))


def _read_pipeline(engine: Any) -> dict[str, int] | None:
    """Return the stage of this rank in a pipeline."""
    module = engine.module
    stages = getattr(module, "num_stages", None)
    if not isinstance(stages, int) or not hasattr(module, "stage_id"):
        return None
    tied = [
        parameter
        for comm in getattr(module, "tied_comms", {}).values()
        if min(comm["ranks"]) != int(engine.global_rank)
        for parameter in comm["module"].parameters()
    ]
    others = {id(parameter) for parameter in tied}
    own = [parameter for parameter in module.parameters() if id(parameter) not in others]
    counts = (sum(int(p.numel()) for p in own), sum(int(p.numel()) for p in own if p.requires_grad))
    return {"stage": int(module.stage_id), "stages": stages, **dict(zip(PARAMETER_COUNTS, counts))}


def _count_largest_layer(engine: Any) -> int:
    """Return the elements of the module that owns the largest parameters, as in DeepSpeed's stage 3 estimates."""
    layers = ([*module.parameters(recurse=False)] for module in engine.module.modules())
    return max(sum(int(getattr(weight, "ds_numel", None) or weight.numel()) for weight in layer) for layer in layers)


def read_devices(device: Any) -> list[dict[str, Any]]:
    """Return the ``devices`` of the engine event: the GPU behind that torch device, if it is a GPU."""
    import torch

    ordinal = find_ordinal(device)
    if ordinal is None:
        return []
    properties = torch.cuda.get_device_properties(ordinal)
    uuid = str(getattr(properties, "uuid", None) or "")
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = names[ordinal].strip() if ordinal < len(names) else ""
    if visible.startswith("MIG-") or (visible.startswith("GPU-") and not uuid):
        uuid = visible  # CUDA may report the UUID of the whole GPU for a MIG instance
    elif uuid and not uuid.startswith("GPU-"):
        uuid = "GPU-" + uuid  # as NVML writes it
    facts = {"ordinal": ordinal, "visible": visible or None, "uuid": uuid or None, "name": properties.name}
    is_unified = bool(getattr(properties, "is_integrated", False))
    free_bytes = torch.cuda.mem_get_info(ordinal)[0] if is_unified else None
    sizes = {"total_bytes": properties.total_memory, "free_bytes": free_bytes}
    return [{**facts, **sizes, "limit_bytes": _read_limit(ordinal, properties.total_memory), "unified": is_unified}]


def _read_limit(ordinal: int, total_bytes: int) -> int | None:
    """Return what the process may reserve of a device; None without ``set_per_process_memory_fraction``."""
    import torch

    try:
        fraction = torch.cuda.get_per_process_memory_fraction(ordinal)
    except (AttributeError, RuntimeError):  # an older PyTorch, or an allocator of the job's own
        return None
    return int(fraction * total_bytes) if 0 < fraction < 1 else None


def read_allocator(device: Any) -> str | None:
    """Return the name of PyTorch's allocator of that device; None without CUDA."""
    import torch

    return None if find_ordinal(device) is None else find_backend(torch)


def _has_activation_checkpointing(engine: Any) -> bool:
    import deepspeed

    if any(getattr(module, "gradient_checkpointing", False) for module in engine.module.modules()):
        return True
    return bool(deepspeed.checkpointing.is_configured())


def _read_configuration(engine: Any) -> dict[str, Any]:
    """Return the user's configuration, completed with ZeRO's defaults and the batch sizes that DeepSpeed derived."""
    config = dict(engine._config._param_dict)
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        config[name] = _try_read(getattr(engine, name))
    zero = _try_read(lambda: json.loads(engine._config.zero_config.model_dump_json()))
    if zero:
        config["zero_optimization"] = zero
    text: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return text


def _list_zero_keys(engine: Any) -> list[str]:
    zero = engine._config._param_dict.get("zero_optimization")
    return [str(key) for key in zero] if isinstance(zero, dict) else []


def _read_world_size(engine: Any) -> int:
    import torch

    return int(torch.distributed.get_world_size())


def read_dimensions(modules: Iterable[Any]) -> dict[str, int] | None:
    """Return the dimensions that a transformers model was configured with; None of another model."""
    for module in modules:
        config = getattr(module, "config", None)
        sizes = {name: getattr(config, attribute, None) for name, attribute in DIMENSIONS.items()}
        found = {name: size for name, size in sizes.items() if isinstance(size, int) and size > 0}
        if found:
            return found
    return None


def _describe_optimizers(engine: Any) -> list[dict[str, Any]]:
    """Return the optimizer that DeepSpeed wraps, without its tensors, which are partitions."""
    optimizer = engine.basic_optimizer
    if optimizer is None:
        return []
    return [optimizer_facts.describe_optimizer(optimizer, {}) | {"parameters": None, "tensors": None}]


_FACT_READERS: dict[str, Callable[[Any], Any]] = {
    "engine_class": lambda engine: type(engine).__name__,
    "zero_stage": lambda engine: int(engine.zero_optimization_stage()),
    "offload_optimizer": lambda engine: _format_offload(engine.zero_offload_optimizer()),
    "offload_parameters": lambda engine: _format_offload(engine.zero_offload_param()),
    "dtype": _read_dtype,
    "autocast": _read_autocast,
    "micro_batch": lambda engine: int(engine.train_micro_batch_size_per_gpu()),
    "gradient_accumulation": lambda engine: int(engine.gradient_accumulation_steps()),
    "train_batch": lambda engine: int(engine.train_batch_size()),
    "world_size": _read_world_size,
    "data_parallel": lambda engine: int(engine.dp_world_size),
    "pipeline": _read_pipeline,
    "rank": lambda engine: int(engine.global_rank),
    "local_rank": lambda engine: int(engine.local_rank),
    "parameters": _count_parameters,
    "largest_layer_parameters": _count_largest_layer,
    "dimensions": lambda engine: read_dimensions([engine.module]),
    "model": lambda engine: type(engine.module).__name__,
    "optimizer": lambda engine: _get_class_name(engine.optimizer),
    "inner_optimizer": lambda engine: _get_class_name(engine.basic_optimizer),
    "optimizers": _describe_optimizers,
    "device": lambda engine: str(engine.device),
    "devices": lambda engine: read_devices(engine.device),
    "allocator": lambda engine: read_allocator(engine.device),
    "activation_checkpointing": _has_activation_checkpointing,
    "wall_clock_breakdown": lambda engine: bool(engine.wall_clock_breakdown()),
    "global_steps": lambda engine: int(engine.global_steps),
    "config": _read_configuration,
    "zero_keys": _list_zero_keys,
}
