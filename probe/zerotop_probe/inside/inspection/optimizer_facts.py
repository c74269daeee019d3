"""Read the parameters that an optimizer updates, and the settings that decide the size of its state."""

from __future__ import annotations

from collections import Counter
from typing import Any

# Of a model in which each parameter has a shape of its own.
_MOST_SHAPES = 500


def describe_optimizer(optimizer: Any, dtype_names: dict[str, str]) -> dict[str, Any]:
    """Return an entry of ``optimizers`` of the ``engine`` event. ``dtype_names``: short names of PyTorch's dtypes."""
    updated = list_updated(optimizer)
    bits, other_bits = _read_state_bits(optimizer)
    kinds: Counter[tuple[tuple[int, ...], str, int | None]] = Counter()
    for parameter in updated:
        dtype = str(parameter.dtype).replace("torch.", "")
        state_bits = other_bits.get(id(parameter), bits)
        kinds[tuple(map(int, parameter.shape)), dtype_names.get(dtype, dtype), state_bits] += 1
    tensors = [
        {"shape": list(shape), "dtype": dtype, "count": count, "state_bits": state_bits}
        for (shape, dtype, state_bits), count in kinds.items()
    ]
    return {
        "class": type(optimizer).__name__,
        "package": type(optimizer).__module__.partition(".")[0],
        "parameters": sum(int(parameter.numel()) for parameter in updated),
        "tensors": tensors if len(tensors) <= _MOST_SHAPES else None,
        "settings": _read_settings(optimizer),
    }


def list_updated(optimizer: Any) -> list[Any]:
    """Return the parameters that an optimizer updates: without frozen ones, unless all are frozen at the moment."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter for parameter in parameters if parameter.requires_grad] or parameters


def _read_settings(optimizer: Any) -> dict[str, Any]:
    settings = {k: v for k, v in optimizer.defaults.items() if isinstance(v, (bool, int, float, str))}
    is_paged = getattr(optimizer, "is_paged", None)  # of bitsandbytes
    return settings | ({"is_paged": is_paged} if isinstance(is_paged, bool) else {})


def _read_state_bits(optimizer: Any) -> tuple[int | None, dict[int, int]]:
    """Return the bits of an element of state in bitsandbytes: the usual ones, and others by id() of the parameter."""
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    if not isinstance(bits, int):
        return None, {}
    # Overrides by register_module_override(), which the Trainer calls for embeddings.
    overrides = getattr(getattr(optimizer, "mng", None), "module_weight_config_triple", ())
    return bits, {id(getattr(module, name, None)): config.get("optim_bits", bits) for module, name, config in overrides}
