"""Measure the size of a micro-batch from the arguments of a forward."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import chain
from typing import Any

from zerotop_probe.recording.tables import UNKNOWN

# Limits the search of a long list without tensors.
_MAX_SEARCHED = 16

# The dtypes of token ids; bytes and booleans are masks or pixels.
_TOKEN_TYPES = frozenset(("torch.int64", "torch.int32", "torch.int16", "torch.uint16", "torch.uint32"))


def measure_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int, int]:
    """Return (rows, sequence length, tokens) of a micro-batch; -1 for unknown values.

    An argument named ``input_ids`` takes precedence. Sequence length and tokens are known only for a 2-D tensor of integers.
    """
    tensor = find_inputs(args, kwargs)
    if tensor is None or not tensor.shape:
        return UNKNOWN, UNKNOWN, UNKNOWN
    sizes = tensor.shape
    if len(sizes) != 2 or not _may_hold_tokens(tensor.dtype):
        return sizes[0], UNKNOWN, UNKNOWN
    return sizes[0], sizes[1], sizes[0] * sizes[1]


def find_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    """Return the tensor that stands for a micro-batch; None without one."""
    tensor = args[0] if len(args) == 1 and not kwargs else kwargs.get("input_ids")
    if not hasattr(tensor, "is_floating_point"):
        tensor = _find_token_ids(args, kwargs)
    if tensor is None:
        tensor = _find_tensor(kwargs.values(), 2)
    return tensor if tensor is not None else _find_tensor(args, 2)


@functools.cache
def _may_hold_tokens(dtype: Any) -> bool:
    return str(dtype) in _TOKEN_TYPES


def _find_token_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    tensor = kwargs.get("input_ids")
    if _is_tensor(tensor):
        return tensor
    for value in chain(args, kwargs.values()):
        # A tokenizer's BatchEncoding is not a dict but has its methods.
        if not _is_tensor(value) and hasattr(value, "keys") and hasattr(value, "get"):
            tensor = value.get("input_ids")
            if _is_tensor(tensor):
                return tensor
    return None


def _find_tensor(values: Iterable[Any], depth: int) -> Any | None:
    for number, value in enumerate(values):
        if number == _MAX_SEARCHED:
            return None
        if _is_tensor(value):
            return value
        if depth and isinstance(value, (list, tuple, dict)):
            tensor = _find_tensor(value.values() if isinstance(value, dict) else value, depth - 1)
            if tensor is not None:
                return tensor
    return None


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "is_floating_point")
