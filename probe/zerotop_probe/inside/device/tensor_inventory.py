"""Whose the bytes are: the tensors of an engine and its optimizer, each storage counted once.

Nothing is guessed. What a tensor is for follows from where it hangs: on a parameter, in the inner optimizer's state, or
under a name in DeepSpeed's optimizer. Views share a storage and count with the first that claimed it. Tensors that hang
nowhere here (activations, batches, libraries' workspaces) are left over, and told as that.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from zerotop_probe.inside.device import allocator_snapshot
from zerotop_probe.inside.device.allocator import NATIVE, find_backend

PARAMETERS = "parameters"
GRADIENTS = "gradients"
MASTER_WEIGHTS = "master_weights"
OPTIMIZER_STATE = "optimizer_state"
BUFFERS = "buffers"

# By what a name in a DeepSpeed optimizer contains, in this order; any other is a buffer.
_CATEGORY_BY_NAME = (
    ("temp_grad_buffer", BUFFERS),
    ("ipg", BUFFERS),
    ("grad", GRADIENTS),
    ("fp32", MASTER_WEIGHTS),
    ("bit16", PARAMETERS),
    ("fp16", PARAMETERS),
    ("lp_param", PARAMETERS),
)
_MAX_DEPTH = 6
_MAX_OBJECTS = 200_000
# Asking whether memory is pinned goes to the driver.
_MIN_PIN_CHECK_BYTES = 1 << 20
_LARGEST_COUNT = 10


class Inventory:
    """Storages by device and address, and what each is for. ``add`` keeps the first claim."""

    def __init__(self) -> None:
        # Tensors that would not tell where they lie, as sparse ones.
        self.unread_count = 0
        self._claims: dict[tuple[str, int], tuple[str, int, bool]] = {}

    def add(self, tensor: Any, category: str) -> None:
        """Claims the storage of a tensor, if it is one and has one."""
        if tensor is None:
            return
        try:
            kind = tensor.device.type
            storage = tensor.untyped_storage()
            size = int(storage.nbytes())
            if kind == "meta" or not size:
                return
            key = (kind, int(storage.data_ptr()))
            if key not in self._claims:
                pinned = kind == "cpu" and size >= _MIN_PIN_CHECK_BYTES and bool(tensor.is_pinned())
                self._claims[key] = (category, size, pinned)
        except Exception:  # whatever a subclass of a tensor does; the others are counted all the same
            self.unread_count += 1

    def sum_host_bytes(self, *, pinned_only: bool = False) -> dict[str, int]:
        """Bytes in host memory by category."""
        found: dict[str, int] = {}
        for (kind, _), (category, size, pinned) in self._claims.items():
            if kind == "cpu" and (pinned or not pinned_only):
                found[category] = found.get(category, 0) + size
        return found

    def sum_device_bytes(self) -> dict[str, int]:
        """Bytes in CUDA memory by category, as large as the storages themselves are: whose allocator shows no blocks."""
        found: dict[str, int] = {}
        for (kind, _), (category, size, _) in self._claims.items():
            if kind == "cuda":
                found[category] = found.get(category, 0) + size
        return found

    def match_blocks(self, blocks: dict[int, int]) -> tuple[dict[str, int], list[int]]:
        """Bytes of allocator's blocks by category, and the sizes of blocks that nobody claims.

        ``blocks``: size of every block in use by its address.
        """
        found: dict[str, int] = {}
        left = dict(blocks)
        for (kind, address), (category, _, _) in self._claims.items():
            if kind == "cuda":
                found[category] = found.get(category, 0) + left.pop(address, 0)
        return found, sorted(left.values(), reverse=True)


def build_inventory(engine: Any) -> Inventory:
    """Everything that hangs on an engine's module and optimizer."""
    found = Inventory()
    for parameter in engine.module.parameters():
        found.add(parameter, PARAMETERS)
        found.add(getattr(parameter, "ds_tensor", None), PARAMETERS)
        found.add(parameter.grad, GRADIENTS)
    for buffer in engine.module.buffers():
        found.add(buffer, PARAMETERS)
    optimizer = engine.optimizer
    if optimizer is None:
        return found
    inner = getattr(optimizer, "optimizer", None) or optimizer
    for tensor in _iter_tensors(getattr(inner, "state", None)):
        found.add(tensor, OPTIMIZER_STATE)
    for group in getattr(inner, "param_groups", ()):
        for weight in group.get("params", ()):
            found.add(weight, MASTER_WEIGHTS)
            found.add(weight.grad, GRADIENTS)
    by_category = sorted(getattr(optimizer, "__dict__", {}).items(), key=lambda entry: _find_category(entry[0]) == BUFFERS)
    for name, value in by_category:
        for tensor in _iter_tensors(value):
            found.add(tensor, _find_category(name))
            if tensor.is_leaf:
                found.add(tensor.grad, GRADIENTS)
    return found


def _find_category(name: str) -> str:
    return next((category for part, category in _CATEGORY_BY_NAME if part in name), BUFFERS)


def _iter_tensors(value: Any) -> Iterator[Any]:
    """Every tensor in containers and in objects of DeepSpeed's, not in modules."""
    torch = sys.modules["torch"]
    waiting: list[tuple[Any, int]] = [(value, 0)]
    seen: set[int] = set()
    while waiting and len(seen) < _MAX_OBJECTS:
        item, depth = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
            continue
        if depth == _MAX_DEPTH or id(item) in seen:
            continue
        seen.add(id(item))
        waiting += [(inside, depth + 1) for inside in _list_children(item, torch)]


def _list_children(item: Any, torch: Any) -> list[Any]:
    if isinstance(item, dict):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
    if isinstance(item, (torch.nn.Module, type)) or not type(item).__module__.startswith("deepspeed."):
        return []
    return list(getattr(item, "__dict__", {}).values())


def build_facts(engine: Any, device: int | None) -> dict[str, Any]:
    """The facts of the ``tensors`` event; ``device`` is the process's own ordinal where CUDA is in use."""
    began = time.monotonic_ns()
    held = build_inventory(engine)
    told: dict[str, Any] = {"host": held.sum_host_bytes(), "host_pinned": held.sum_host_bytes(pinned_only=True)}
    told["unread"] = held.unread_count
    if device is not None:
        told |= _build_device_facts(held, device)
        told["pinned_allocator"] = _read_pinned_allocator()
    told["seconds"] = (time.monotonic_ns() - began) / 1e9
    return told


def _build_device_facts(inventory: Inventory, device: int) -> dict[str, Any]:
    if find_backend(sys.modules["torch"]) != NATIVE:
        return {"device": inventory.sum_device_bytes(), "allocated_bytes": None}
    blocks = allocator_snapshot.read_used_blocks(device)
    by_category, unclaimed = inventory.match_blocks(blocks)
    return {
        "device": by_category,
        "allocated_bytes": sum(blocks.values()),
        "unclaimed_bytes": sum(unclaimed),
        "unclaimed_largest": unclaimed[:_LARGEST_COUNT],
    }


def _read_pinned_allocator() -> dict[str, int] | None:
    """Bytes of PyTorch's allocator for pinned host memory, which rounds up to powers of two; null where not told."""
    read = getattr(sys.modules["torch"].cuda, "host_memory_stats", None)
    if read is None:
        return None
    stats = read()
    names = {"allocated_bytes": "allocated_bytes.current", "active_bytes": "active_bytes.current"}
    return {name: int(stats[key]) for name, key in names.items() if key in stats}
