"""Whether the state of optimizers on the CPU holds subnormal numbers, with which processors compute many times slower.

The momentum of weights that get no gradients any more, as behind a ReLU that is always off, decays to such numbers in some
800 steps. Samples of the memory are read as integers: no operation of PyTorch runs, and no code of the job.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import islice
from typing import Any

# Parameters whose state is read, values of each tensor, and how many of all must be subnormal.
_PARAMETERS, _VALUES, _LEAST_SHARE = 8, 64, 0.01
_MAGNITUDE, _SMALLEST_NORMAL = 0x7FFF_FFFF, 0x0080_0000  # bits of a float32


def holds_subnormal(optimizers: Iterable[Any]) -> bool:
    """Return whether a notable part of the sampled values is subnormal. Only fp32 tensors in host memory are read."""
    found = read = 0
    for optimizer in optimizers:
        states = getattr(optimizer, "__dict__", {}).get("state")
        for state in islice(states.values(), _PARAMETERS) if isinstance(states, dict) else ():
            for tensor in state.values() if isinstance(state, dict) else ():
                if _is_read(tensor):
                    values = _sample(tensor)
                    read += len(values)
                    found += sum(0 < value & _MAGNITUDE < _SMALLEST_NORMAL for value in values)
    return found > 0 and found >= _LEAST_SHARE * read


def _is_read(tensor: Any) -> bool:
    torch = sys.modules["torch"]
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype is torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.numel() > 1
        and tensor.is_contiguous()
        and tensor.data_ptr() != 0
        and tensor.untyped_storage().nbytes() >= 4 * (tensor.storage_offset() + tensor.numel())
    )


def _sample(tensor: Any) -> list[int]:
    try:
        import ctypes  # not every Python has it
    except ImportError:
        return []
    count = tensor.numel()
    memory = (ctypes.c_uint32 * count).from_address(tensor.data_ptr())
    values: list[int] = memory[:: max(1, count // _VALUES)]
    return values
