"""Read how models are trained at the moment: what a change of time or memory may come from. Names and counts, no values.

Reading takes a microsecond for a parameter and a few for a module: only for looks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from zerotop_probe.recording.event_values import INPUTS, OBJECTS
from zerotop_probe.recording.interruptions import suppress_own

# Options of PyTorch's optimizers that change what a step does.
_OPTIONS = ("foreach", "fused", "capturable", "differentiable", "amsgrad", "maximize", "nesterov")
# Parts of the names of classes whose modules act otherwise in evaluation mode.
_SWITCHED = ("Dropout", "BatchNorm")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes of classes of modules; those that begin with "_" are switched by libraries, as DDP does in its second step.
_OF_CLASSES = frozenset(("call_super_init", "dump_patches"))
_MOST_ATTRIBUTES = 200

_FLAGS: dict[str, Callable[[Any], Any]] = {
    "cudnn.enabled": lambda torch: torch.backends.cudnn.enabled,
    "cudnn.benchmark": lambda torch: torch.backends.cudnn.benchmark,
    "cudnn.deterministic": lambda torch: torch.backends.cudnn.deterministic,
    "matmul_precision": lambda torch: _read_matmul_precision(torch),
    "deterministic_algorithms": lambda torch: torch.are_deterministic_algorithms_enabled(),
    "anomaly_mode": lambda torch: torch.is_anomaly_enabled(),
    "flash_attention": lambda torch: torch.backends.cuda.flash_sdp_enabled(),
    "efficient_attention": lambda torch: torch.backends.cuda.mem_efficient_sdp_enabled(),
    "threads": lambda torch: torch.get_num_threads(),
}

# Flags that are recorded once. Their changes are no news: those who switch one also switch another.
_FIRST_FLAGS: dict[str, Callable[[Any], Any]] = {
    "cudnn_attention": lambda torch: torch.backends.cuda.cudnn_sdp_enabled(),
    "math_attention": lambda torch: torch.backends.cuda.math_sdp_enabled(),
}
_RECORDED_FLAGS = (
    *("deterministic_algorithms", "cudnn.deterministic", "cudnn.benchmark", "matmul_precision"),
    *("flash_attention", "efficient_attention"),
)


class Change(NamedTuple):
    """A setting that is another one than at the last look. Either value is None if there was none."""

    name: str
    before: Any
    after: Any


def read_settings(modules: Iterable[Any], optimizers: Iterable[Any], autocast: str) -> dict[str, Any]:
    """Return the settings of models and optimizers, and PyTorch's own. ``autocast``: seen in the last forward."""
    settings: dict[str, Any] = {"autocast": autocast, **_read_flags(_FLAGS)}
    roots = list(modules)
    parts = list_submodules(roots)
    _read_parameters(settings, parts)
    _read_modules(settings, parts)
    settings["compiled"] = sum(type(root).__name__ == "OptimizedModule" for root in roots)
    # A part of a model that is called by itself, as checkpointing does, may have no configuration.
    kinds = {getattr(getattr(one, "config", None), "_attn_implementation", None) for one in roots}
    settings["attention"] = sorted(str(kind) for kind in kinds if kind)
    updated = list(optimizers)
    settings[OBJECTS] = [id(one) for one in updated]
    settings["optimizers"] = [type(one).__name__ for one in updated]
    for option in _OPTIONS:
        groups = [group for one in updated for group in getattr(one, "param_groups", ())]
        values = {str(group[option]) for group in groups if option in group}
        if values:
            settings[f"optimizer.{option}"] = values.pop() if len(values) == 1 else "mixed"
    return settings


def list_first_flags(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of the event ``torch_flags``, from the settings of the first look."""
    flags = {name.replace(".", "_"): settings[name] for name in _RECORDED_FLAGS} | _read_flags(_FIRST_FLAGS)
    return {name: value for name, value in flags.items() if value is not None}


def _read_flags(flags: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    values: dict[str, Any] = dict.fromkeys(flags)
    torch = sys.modules["torch"]
    for name, read in flags.items():
        with suppress_own(Exception):  # another version, or built without it
            values[name] = read(torch)
    return values


def _read_matmul_precision(torch: Any) -> str:
    # The older function warns, or fails, in a job that uses the newer settings.
    read = getattr(torch._C, "_get_fp32_precision_getter", None)
    return str(read("cuda", "matmul") if read is not None else torch.get_float32_matmul_precision())


def list_submodules(roots: list[Any]) -> list[Any]:
    """Return the modules and all within them, each once; a third of the time that ``modules()`` takes."""
    found: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            waiting += module._modules.values()
    return list(found.values())


def _read_parameters(settings: dict[str, Any], modules: list[Any]) -> None:
    sizes: Counter[tuple[Any, Any, bool]] = Counter()
    hooks = 0
    own = (one for module in modules for one in module._parameters.values() if one is not None)
    for parameter in {id(one): one for one in own}.values():
        sizes[parameter.dtype, parameter.device, parameter.requires_grad] += parameter.numel()
        hooks += len(parameter._backward_hooks or ()) + len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
    dtypes: Counter[str] = Counter()
    devices: Counter[str] = Counter()
    for (dtype, device, _), size in sizes.items():
        dtypes[str(dtype).replace("torch.", "")] += size
        devices[str(device.type)] += size
    trained = sum(size for (_, _, trains), size in sizes.items() if trains)
    settings |= {"parameters": sum(sizes.values()), "trained_parameters": trained, "parameter_hooks": hooks}
    settings |= {"dtypes": dict(dtypes), "devices": dict(devices)}


def _read_modules(settings: dict[str, Any], modules: list[Any]) -> None:
    attributes: Counter[str] = Counter()
    hooks: Counter[str] = Counter()
    switched: Counter[str] = Counter()
    for module in modules:
        kind = type(module).__name__
        if module.training and any(part in kind for part in _SWITCHED) and _drops(module):
            switched[kind] += 1
        for name, value in vars(module).items():
            if value is True and not name.startswith("_") and name not in _OF_CLASSES:
                attributes[name] += 1
            elif name in _HOOKS and value:
                hooks[kind] += len(value)
    shared = sys.modules["torch.nn.modules.module"]
    hooks["all modules"] += sum(len(getattr(shared, f"_global{name}", ())) for name in _HOOKS)
    settings |= {"modules": len(modules), "hooks": dict(hooks), "training_layers": dict(switched)}
    settings |= {f"module.{name}": count for name, count in attributes.most_common(_MOST_ATTRIBUTES)}


def _drops(module: Any) -> bool:
    """Return whether a module is no dropout of probability 0. A tensor is not read: that would wait for the device."""
    probability = vars(module).get("p")
    return not (isinstance(probability, (int, float)) and probability == 0)


def list_changes(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """Return the settings that differ. An attribute that no module has set to True any more counts 0.

    Inputs that begin to vary, or of a model that is called for the first time, are no change.
    """
    changes = []
    for name in sorted({*before, *after}):
        absent = 0 if name.startswith("module.") else None
        old, new = before.get(name, absent), after.get(name, absent)
        if old != new and not (name.startswith(INPUTS) and (old is None or new is None)):
            changes.append(Change(name, old, new))
    return changes
