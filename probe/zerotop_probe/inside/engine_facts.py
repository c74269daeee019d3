"""What a DeepSpeed engine is: read once, without collectives, through the methods that all versions share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from zerotop_probe.inside.device import tensor_inventory
from zerotop_probe.inside.device.allocator import backend
from zerotop_probe.inside.engines import Engine
from zerotop_probe.inside.guard import now
from zerotop_probe.inside.probe import Probe, attribute_device
from zerotop_probe.recording import events, redact

_PARAMETERS = ("parameters", "trainable_parameters", "rank_parameters")
_ERROR_LENGTH = 200


def record_engine(probe: Probe, known: Engine, engine: Any) -> None:
    """Records the ``engine`` event, and the planned steps where the configuration tells them."""
    facts = engine_facts(engine)
    known.loss_scaled = facts["dtype"] == "fp16" or facts["autocast"] == "fp16"
    known.offloads_optimizer = facts["offload_optimizer"] not in (None, "none")
    known.offloads_parameters = facts["offload_parameters"] not in (None, "none")
    known.trains = bool(facts["optimizer"])
    probe.watch_device(attribute_device(getattr(engine, "device", None)))
    if probe.recorder is None:
        return
    probe.recorder.event(now(), events.ENGINE, engine=known.index, **facts)
    steps = planned_steps(facts["config"])
    if steps is not None:
        probe.recorder.event(now(), events.TOTAL_STEPS, steps=steps, source="config")


def record_tensors(probe: Probe, known: Engine, engine: Any, when: str) -> None:
    """Records the ``tensors`` event of that moment, once."""
    if probe.recorder is None or when in known.inventories:
        return
    known.inventories.add(when)
    time_ns, step = now(), int(engine.global_steps)
    told = tensor_inventory.facts(engine, attribute_device(engine.device))
    probe.recorder.event(time_ns, events.TENSORS, engine=known.index, step=step, when=when, **told)


def engine_facts(engine: Any) -> dict[str, Any]:
    """The facts of the ``engine`` event; what this version of DeepSpeed does not tell is null, and why is in ``unread``."""
    facts: dict[str, Any] = {}
    unread: dict[str, str] = {}
    for name, read in _FACTS.items():
        try:
            facts[name] = read(engine)
        except Exception as error:  # one fact that cannot be had is no reason to give up the others
            facts[name] = None
            unread[name] = redact.text(f"{type(error).__name__}: {error}")[:_ERROR_LENGTH]
    parameters = facts.pop("parameters") or dict.fromkeys(_PARAMETERS)
    facts["config"] = redact.tree(facts["config"] or {})
    return {**facts, **parameters, "devices": facts["devices"] or [], "unread": unread}


def planned_steps(config: dict[str, Any]) -> int | None:
    """The optimizer steps that the configuration's scheduler is planned for, or None."""
    steps = _or_none(lambda: config["scheduler"]["params"]["total_num_steps"])
    return steps if isinstance(steps, int) and steps > 0 else None


def _or_none(read: Callable[[], Any]) -> Any:
    """For what versions of DeepSpeed name differently, or lack."""
    try:
        return read()
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


def _class_name(value: Any) -> str:
    # An engine without an optimizer has None, or a stand-in that only partitions parameters.
    name = "" if value is None else type(value).__name__
    return "" if name in ("DummyOptim", "DeepSpeedZeRoOffload") else name


def _offload(configuration: Any) -> str:
    return "none" if configuration is None else str(getattr(configuration.device, "value", configuration.device))


def _dtype(engine: Any) -> str | None:
    if _or_none(lambda: bool(engine.fp16_enabled())):
        return "fp16"
    return "bf16" if _or_none(lambda: bool(engine.bfloat16_enabled())) else "fp32"


def _autocast(engine: Any) -> str | None:
    """The type that torch.autocast computes in where DeepSpeed was told to use it, else null."""
    if not _or_none(lambda: bool(engine.torch_autocast_enabled())):
        return None
    name = str(_or_none(engine.torch_autocast_dtype))
    return {"torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(name, name)


def _parameters(engine: Any) -> dict[str, int]:
    """Elements in all parameters, in those that train, and in what this rank keeps of them.

    ZeRO stage 3 leaves empty tensors in the module and hangs the true size and this rank's share on each.
    """
    total = trainable = kept = 0
    for parameter in engine.module.parameters():
        whole = getattr(parameter, "ds_numel", None)
        size = int(parameter.numel() if whole is None else whole)
        share = getattr(parameter, "ds_tensor", None)
        total += size
        trainable += size if parameter.requires_grad else 0
        kept += size if share is None else int(share.numel())
    return dict(zip(_PARAMETERS, (total, trainable, kept)))


def _largest_layer(engine: Any) -> int:
    """Elements in the parameters of the module that has most of its own, as DeepSpeed's estimates for stage 3 count them."""
    own = ([*module.parameters(recurse=False)] for module in engine.module.modules())
    return max(sum(int(getattr(each, "ds_numel", None) or each.numel()) for each in parameters) for parameters in own)


def _devices(engine: Any) -> list[dict[str, Any]]:
    import torch

    ordinal = attribute_device(engine.device)
    if ordinal is None:
        return []
    properties = torch.cuda.get_device_properties(ordinal)
    uuid = str(getattr(properties, "uuid", None) or "")
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = names[ordinal].strip() if ordinal < len(names) else ""
    if visible.startswith("MIG-") or (visible.startswith("GPU-") and not uuid):
        uuid = visible  # of a MIG instance CUDA may tell the whole GPU's
    elif uuid and not uuid.startswith("GPU-"):
        uuid = "GPU-" + uuid  # as NVML writes it
    facts = {"ordinal": ordinal, "visible": visible or None, "uuid": uuid or None, "name": properties.name}
    return [{**facts, "total_bytes": properties.total_memory}]


def _allocator(engine: Any) -> str | None:
    import torch

    return None if attribute_device(engine.device) is None else backend(torch)


def _checkpoints_activations(engine: Any) -> bool:
    import deepspeed

    if any(getattr(module, "gradient_checkpointing", False) for module in engine.module.modules()):
        return True
    return bool(deepspeed.checkpointing.is_configured())


def _configuration(engine: Any) -> dict[str, Any]:
    """The user's configuration, with ZeRO's defaults and the batch sizes that DeepSpeed derived filled in."""
    config = dict(engine._config._param_dict)
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        config[name] = _or_none(getattr(engine, name))
    zero = _or_none(lambda: json.loads(engine._config.zero_config.model_dump_json()))
    if zero:
        config["zero_optimization"] = zero
    text: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return text


def _world_size(engine: Any) -> int:
    import torch

    return int(torch.distributed.get_world_size())


_FACTS: dict[str, Callable[[Any], Any]] = {
    "engine_class": lambda engine: type(engine).__name__,
    "zero_stage": lambda engine: int(engine.zero_optimization_stage()),
    "offload_optimizer": lambda engine: _offload(engine.zero_offload_optimizer()),
    "offload_parameters": lambda engine: _offload(engine.zero_offload_param()),
    "dtype": _dtype,
    "autocast": _autocast,
    "micro_batch": lambda engine: int(engine.train_micro_batch_size_per_gpu()),
    "gradient_accumulation": lambda engine: int(engine.gradient_accumulation_steps()),
    "train_batch": lambda engine: int(engine.train_batch_size()),
    "world_size": _world_size,
    "data_parallel": lambda engine: int(engine.dp_world_size),
    "rank": lambda engine: int(engine.global_rank),
    "local_rank": lambda engine: int(engine.local_rank),
    "parameters": _parameters,
    "largest_layer_parameters": _largest_layer,
    "model": lambda engine: type(engine.module).__name__,
    "optimizer": lambda engine: _class_name(engine.optimizer),
    "inner_optimizer": lambda engine: _class_name(engine.basic_optimizer),
    "device": lambda engine: str(engine.device),
    "devices": _devices,
    "allocator": _allocator,
    "activation_checkpointing": _checkpoints_activations,
    "wall_clock_breakdown": lambda engine: bool(engine.wall_clock_breakdown()),
    "global_steps": lambda engine: int(engine.global_steps),
    "config": _configuration,
}
