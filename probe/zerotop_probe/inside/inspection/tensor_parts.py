"""Tensors that consist of others: sharded ones (DTensor), and ones quantized by torchao or bitsandbytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

# Attributes of bitsandbytes' 8-bit parameters: the weights, and their scales.
_INT8_PARTS = ("CB", "SCB")


def list_parts(tensor: Any) -> list[Any] | None:
    """Return the inner tensors of a tensor that has no storage itself; None for any other."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [part for part in parts if hasattr(part, "untyped_storage")]


def list_reference_parameters(modules: Iterable[Any], optimizers: Iterable[Any]) -> set[int]:
    """Return the parameters, by id(), of models that no optimizer updates: teachers, reference models.

    They need no gradients, though ``requires_grad`` may say so. Empty where no optimizer updates any of the models.
    """
    updated = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    by_module = [{id(parameter) for parameter in module.parameters()} for module in modules]
    idle = [parameters for parameters in by_module if updated.isdisjoint(parameters)]
    return set().union(*idle) if len(idle) < len(by_module) else set()


def is_quantized(parameter: Any) -> bool:
    """Return whether its elements are stored as small integers."""
    if getattr(parameter, "quant_state", None) is not None or not parameter.dtype.is_floating_point:
        return True
    return any(not part.dtype.is_floating_point for part in list_parts(parameter) or ())


def count_elements(parameter: Any) -> int:
    """Return the elements of a parameter, also where two of them share a byte."""
    shape = getattr(getattr(parameter, "quant_state", None), "shape", None)
    return math.prod(shape) if shape is not None else int(parameter.numel())


def iter_constants(parameter: Any) -> Iterator[Any]:
    """Iterate over the tensors beside a quantized parameter of bitsandbytes: scales, and codes."""
    for name in _INT8_PARTS:
        yield getattr(parameter, name, None)
    state = getattr(parameter, "quant_state", None)
    while state is not None:
        yield from (getattr(state, name, None) for name in ("absmax", "code", "offset"))
        state = getattr(state, "state2", None)
