"""Read the facts of a loop that trains without DeepSpeed, once, from its models and optimizers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from zerotop_probe.inside.device import tensor_inventory
from zerotop_probe.inside.engines import LoopState
from zerotop_probe.inside.facts.engine_facts import (
    PARAMETER_COUNTS,
    read_allocator,
    read_devices,
    read_dimensions,
    read_facts,
    write_tensors,
)
from zerotop_probe.inside.facts.script_names import find_names
from zerotop_probe.inside.guard import now
from zerotop_probe.inside.inspection import identity, optimizer_facts, sharding, tensor_parts
from zerotop_probe.inside.inspection.training_library import TrainingLibrary
from zerotop_probe.inside.probe import Probe
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.recording import events, launchers
from zerotop_probe.recording.interruptions import is_interruption

LOOP = "loop"

# Modules that hold the model as an attribute, by class name: parallelism as people call it, and the attribute.
_WRAPPERS = {
    "DistributedDataParallel": ("DDP", "module"),
    "DataParallel": ("DataParallel", "module"),
    "FullyShardedDataParallel": ("FSDP", "module"),
    "OptimizedModule": ("", "_orig_mod"),
}
_DTYPE_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


class LoopParts(NamedTuple):
    modules: list[Any]
    optimizers: list[Any]
    library: TrainingLibrary


def record_loop(probe: Probe, state: LoopState, modules: list[Any], optimizers: list[Any], **known: Any) -> None:
    """Record the ``engine`` event of a loop; ``known``: facts that cannot be read at this moment."""
    if probe.recorder is not None:
        facts = read_facts(LoopParts(modules, optimizers, probe.library), _FACT_READERS) | known
        probe.recorder.write_event(now(), events.Engine, engine=state.index, kind=LOOP, **facts)


def record_loop_tensors(
    probe: Probe,
    state: LoopState,
    modules: list[Any],
    optimizers: list[Any],
    when: str,
    step: int | None = None,
    **more: Any,
) -> None:
    """Record the ``tensors`` event of that moment, once unless it has a ``step``, with ``more`` facts."""

    def build() -> tensor_inventory.Inventory:
        return tensor_inventory.build_loop_inventory(modules, optimizers)

    write_tensors(probe, state, when, find_device(modules, optimizers), build, step, **more)


def find_device(modules: Iterable[Any], optimizers: Iterable[Any]) -> Any:
    """Return the torch device of the first parameter that has memory; None without one.

    A model on the meta device is only called with the parameters of others, as in torch.func.functional_call.
    """
    devices = (parameter.device for parameter in _iter_parameters(modules, optimizers))
    return next((device for device in devices if device.type != "meta"), None)


def _iter_parameters(modules: Iterable[Any], optimizers: Iterable[Any]) -> Iterator[Any]:
    """Iterate over all parameters of models and optimizers, each once."""
    seen: set[int] = set()
    own = (parameter for module in modules for parameter in module.parameters())
    updated = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    for parameters in (own, updated):
        for parameter in parameters:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _split_parameters(parts: LoopParts) -> tuple[list[Any], list[Any]]:
    """Return the parameters that are trained, and the others, each once."""
    references = tensor_parts.list_reference_parameters(parts.modules, parts.optimizers)
    trained: list[Any] = []
    frozen: list[Any] = []
    for parameter in _iter_parameters(parts.modules, parts.optimizers):
        (trained if parameter.requires_grad and id(parameter) not in references else frozen).append(parameter)
    return trained, frozen


def _unwrap(module: Any) -> tuple[Any, list[str]]:
    """Return the model inside of wrappers, and the names of the kinds of parallelism around it."""
    kinds = []
    while type(module).__name__ in _WRAPPERS:
        kind, attribute = _WRAPPERS[type(module).__name__]
        kinds += [kind] if kind else []
        module = getattr(module, attribute)
    if type(module).__name__.startswith("FSDP") and hasattr(module, "_get_fsdp_state"):
        kinds.append("FSDP2")
    return module, kinds


def _name_models(parts: LoopParts) -> str:
    names = [type(_unwrap(module)[0]).__name__.removeprefix("FSDP") for module in parts.modules]
    return " + ".join(dict.fromkeys(names))


def _find_parallelism(parts: LoopParts) -> str:
    return next((kind for module in parts.modules for kind in _unwrap(module)[1]), "")


def _count_parameters(parts: LoopParts) -> dict[str, int]:
    groups = _find_groups(parts)
    if groups:  # the parameters of module and optimizer are those of the groups, or parts of them
        trained, frozen = sum(group.trainable for group in groups), sum(group.frozen for group in groups)
        kept = sum(-(-(group.trainable + group.frozen) // group.ranks) for group in groups)
    else:
        trained, frozen = (sum(map(tensor_parts.count_elements, parameters)) for parameters in _split_parameters(parts))
        kept = trained + frozen
    return dict(zip(PARAMETER_COUNTS, (trained + frozen, trained, kept)))


def _find_groups(parts: LoopParts) -> list[sharding.ShardedGroup]:
    try:
        return _read_groups(parts)
    except Exception as error:
        if is_interruption(error) or _find_parallelism(parts) != "FSDP2":
            raise
        return []  # its parameters know their whole size


def _read_groups(parts: LoopParts) -> list[sharding.ShardedGroup]:
    return [group for module in parts.modules for group in sharding.find_groups(module)]


def _describe_sharding(parts: LoopParts) -> dict[str, Any] | None:
    """Return how FSDP shards the models; None without."""
    groups = _read_groups(parts)
    if not groups:
        return None
    sizes = [group.trainable + group.frozen for group in groups]
    # The outermost group keeps its parameters until the backward anyway.
    inner = groups[1:] or groups
    dtypes = {_name_dtype(group.dtype) for group in groups if group.dtype is not None}
    return {
        "ranks": max(group.ranks for group in groups),
        "groups": len(groups),
        "largest_group": max(sizes),
        "reshards": all(group.reshards for group in inner),
        "dtype": next(iter(dtypes)) if len(dtypes) == 1 else None,
    }


def _name_dtype(dtype: Any) -> str:
    name = str(dtype).replace("torch.", "")
    return _DTYPE_NAMES.get(name, name)


def _count_largest_layer(parts: LoopParts) -> int:
    layers = (module.parameters(recurse=False) for root in parts.modules for module in root.modules())
    return max((sum(weight.numel() for weight in layer) for layer in layers), default=0)


def _read_dtype(parts: LoopParts) -> str | None:
    """Return the dtype of most elements of trainable parameters, else of all."""
    sizes: dict[str, int] = {}
    trained, frozen = _split_parameters(parts)
    for parameter in trained or frozen:
        name = _name_dtype(parameter.dtype)
        sizes[name] = sizes.get(name, 0) + parameter.numel()
    return max(sizes, key=lambda name: sizes[name]) if sizes else None


def _read_frozen_dtype(parts: LoopParts) -> str | None:
    """Return the dtype of frozen parameters, if all have the same."""
    _, frozen = _split_parameters(parts)
    names = {_name_dtype(parameter.dtype) for parameter in frozen if not tensor_parts.is_quantized(parameter)}
    return names.pop() if len(names) == 1 else None


def _count_quantized(parts: LoopParts) -> int:
    quantized = filter(tensor_parts.is_quantized, _iter_parameters(parts.modules, []))
    return sum(map(tensor_parts.count_elements, quantized))


def _read_autocast(parts: LoopParts) -> str | None:
    """Return the dtype of autocast: the library's setting, or the one in effect around this call of the model."""
    torch, device = sys.modules["torch"], find_device(parts.modules, parts.optimizers)
    library = parts.library.find_mixed_precision()
    if library is not None or device is None or not torch.is_autocast_enabled(device.type):
        return library
    return _name_dtype(torch.get_autocast_dtype(device.type))


def _describe_optimizers(parts: LoopParts) -> list[dict[str, Any]]:
    """Return the elements and settings of each optimizer, on all ranks together."""
    described = [optimizer_facts.describe_optimizer(optimizer, _DTYPE_NAMES) for optimizer in parts.optimizers]
    groups = _find_groups(parts)
    for facts, optimizer in zip(described, parts.optimizers):
        if groups and not all(hasattr(p, "device_mesh") for p in optimizer_facts.list_updated(optimizer)):
            # FSDP1: the parameters are parts of flat ones.
            facts |= {"parameters": sum(group.trainable for group in groups), "tensors": None}
    return described


def _name_optimizers(parts: LoopParts) -> str:
    return " + ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in parts.optimizers))


def _find_group_size(parts: LoopParts) -> int:
    """Return the ranks that share the gradients; 1 without parallelism."""
    for module in parts.modules:
        group = getattr(module, "process_group", None)
        if group is not None and hasattr(group, "size"):
            return int(group.size())
    return _read_world_size(parts) if _find_parallelism(parts).startswith("FSDP") else 1


def _read_world_size(parts: LoopParts) -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return launchers.read_number(os.environ, launchers.WORLD_SIZE) or 1


def _find_train_batch(parts: LoopParts) -> int | None:
    sizes = (parts.library.find_micro_batch(), parts.library.find_gradient_accumulation(), _find_group_size(parts))
    return None if None in sizes else sizes[0] * sizes[1] * sizes[2]  # type: ignore[operator]


def _has_activation_checkpointing(parts: LoopParts) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for root in parts.modules for module in root.modules())


def _is_compiled(parts: LoopParts) -> bool:
    return any(type(module).__name__ == "OptimizedModule" for root in parts.modules for module in root.modules())


_FACT_READERS: dict[str, Callable[[LoopParts], Any]] = {
    "parallelism": _find_parallelism,
    "sharding": _describe_sharding,
    "library": lambda parts: parts.library.find_name(),
    "dtype": _read_dtype,
    "frozen_dtype": _read_frozen_dtype,
    "quantized_parameters": _count_quantized,
    "autocast": _read_autocast,
    "micro_batch": lambda parts: parts.library.find_micro_batch(),
    "gradient_accumulation": lambda parts: parts.library.find_gradient_accumulation(),
    "train_batch": _find_train_batch,
    "world_size": _read_world_size,
    "data_parallel": _find_group_size,
    "rank": lambda parts: identity.find_rank(os.environ),
    "local_rank": lambda parts: launchers.read_number(os.environ, launchers.LOCAL_RANK),
    "dimensions": lambda parts: read_dimensions(_unwrap(module)[0] for module in parts.modules),
    "parameters": _count_parameters,
    "largest_layer_parameters": _count_largest_layer,
    "model": _name_models,
    "optimizer": _name_optimizers,
    "inner_optimizer": _name_optimizers,
    "optimizers": _describe_optimizers,
    "names": lambda parts: find_names(parts.modules, parts.optimizers, PathNames.for_this_process()),
    "device": lambda parts: str(find_device(parts.modules, parts.optimizers) or ""),
    "devices": lambda parts: read_devices(find_device(parts.modules, parts.optimizers)),
    "allocator": lambda parts: read_allocator(find_device(parts.modules, parts.optimizers)),
    "activation_checkpointing": _has_activation_checkpointing,
    "compiled": _is_compiled,
    "global_steps": lambda parts: 0,
    "config": lambda parts: {},
}
