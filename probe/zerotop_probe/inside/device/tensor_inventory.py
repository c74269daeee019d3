"""Sum the tensor bytes of an engine, or of a loop's models and optimizers, by category, each storage once.

Nothing is guessed. The category of a tensor follows from its owner: a parameter, the inner optimizer's state, or an
attribute of DeepSpeed's optimizer. Views share a storage, which counts for the first tensor that claims it. Tensors without
such an owner (activations, batches, workspaces of libraries) are reported as unclaimed. The gradient buckets of
DistributedDataParallel belong to C++: their sizes are known, and unclaimed blocks of these sizes are taken for them.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zerotop_probe.inside.device import allocator_snapshot
from zerotop_probe.inside.device.allocator import NATIVE, find_backend
from zerotop_probe.inside.inspection import sharding, tensor_parts
from zerotop_probe.recording.interruptions import is_interruption, suppress_own

PARAMETERS = "parameters"
GRADIENTS = "gradients"
MASTER_WEIGHTS = "master_weights"
OPTIMIZER_STATE = "optimizer_state"
BUFFERS = "buffers"
FROZEN_PARAMETERS = "frozen_parameters"
QUANTIZED_PARAMETERS = "quantized_parameters"
UNSHARDED_PARAMETERS = "unsharded_parameters"
GRADIENT_BUCKETS = "gradient_buckets"

# Category of an attribute of a DeepSpeed optimizer, by the first of these parts in its name; any other is a buffer.
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
# is_pinned() calls the driver.
_MIN_PIN_CHECK_BYTES = 1 << 20
_LARGEST_COUNT = 10
# Returns the entries of ``held``, by address and size of unclaimed blocks; None if it did not search.
FindHeld = Callable[[dict[int, int]], "list[dict[str, Any]] | None"]
# A block is at most this much larger than the tensor in it; larger remainders are split off.
_ROUNDING = 1 << 20


class Inventory:
    """Storages by device and address, with the category of each. The first claim counts."""

    def __init__(self) -> None:
        # Tensors whose storage cannot be read, such as sparse ones.
        self.unread_count = 0
        # Sizes of tensors that C++ holds, by category.
        self.hidden_sizes: dict[str, list[int]] = {}
        self._claims: dict[tuple[str, int], tuple[str, int, bool]] = {}
        # Class names of a loop's optimizers, and the numbers of those whose state a storage is.
        self.optimizers: list[str] = []
        self._owners: dict[tuple[str, int], int] = {}

    def add(self, tensor: Any, category: str, owner: int | None = None) -> None:
        """Claim the storages of a tensor for a category, unless the tensor is None or has none.

        ``owner``: the index in ``optimizers`` of the optimizer that owns the state.
        """
        if tensor is None:
            return
        try:
            parts = tensor_parts.list_parts(tensor)
            if parts is not None:
                for part in parts:
                    self.add(part, category, owner)
                return
            kind = tensor.device.type
            storage = tensor.untyped_storage()
            size = int(storage.nbytes())
            if kind == "meta" or not size:
                return
            key = (kind, int(storage.data_ptr()))
            if key not in self._claims:
                pinned = kind == "cpu" and size >= _MIN_PIN_CHECK_BYTES and bool(tensor.is_pinned())
                self._claims[key] = (category, size, pinned)
                if owner is not None:
                    self._owners[key] = owner
        except Exception as error:  # a tensor subclass may raise anything; the others are counted all the same
            if is_interruption(error):
                raise
            self.unread_count += 1

    def sum_host_bytes(self, *, pinned_only: bool = False) -> dict[str, int]:
        """Return bytes in host memory by category."""
        sizes: dict[str, int] = {}
        for (kind, _), (category, size, pinned) in self._claims.items():
            if kind == "cpu" and (pinned or not pinned_only):
                sizes[category] = sizes.get(category, 0) + size
        return sizes

    def sum_device_bytes(self) -> dict[str, int]:
        """Return bytes of storages in CUDA memory by category, for an allocator that shows no blocks."""
        sizes: dict[str, int] = {}
        for (kind, _), (category, size, _) in self._claims.items():
            if kind == "cuda":
                sizes[category] = sizes.get(category, 0) + size
        return sizes

    def sum_by_optimizer(self, blocks: dict[int, int] | None) -> list[dict[str, Any]]:
        """Return the class of each optimizer, and the bytes of its state on the device and in host memory.

        ``blocks``: address -> size of every block in use; None for an allocator that shows none.
        """
        sizes: list[dict[str, Any]] = [{"class": name, "device": 0, "host": 0} for name in self.optimizers]
        for (kind, address), owner in self._owners.items():
            size = self._claims[kind, address][1]
            if kind == "cpu":
                sizes[owner]["host"] += size
            elif kind == "cuda":
                sizes[owner]["device"] += size if blocks is None else blocks.get(address, 0)
        return sizes

    def match_blocks(self, blocks: dict[int, int]) -> tuple[dict[str, int], dict[int, int]]:
        """Return bytes of the allocator's blocks by category, and the unclaimed blocks, largest first.

        ``blocks``: address -> size of every block in use.
        """
        sizes: dict[str, int] = {}
        unclaimed = dict(blocks)
        for (kind, address), (category, _, _) in self._claims.items():
            if kind == "cuda":
                sizes[category] = sizes.get(category, 0) + unclaimed.pop(address, 0)
        left = sorted(unclaimed.items(), key=lambda block: -block[1])
        for category, hidden in self.hidden_sizes.items():
            for size in hidden:
                block = next((block for block in reversed(left) if size <= block[1] < size + _ROUNDING), None)
                if block is not None:
                    left.remove(block)
                    sizes[category] = sizes.get(category, 0) + block[1]
        return sizes, dict(left)


def build_inventory(engine: Any) -> Inventory:
    """Return the tensors of an engine's module and optimizer."""
    inventory = Inventory()
    for parameter in engine.module.parameters():
        inventory.add(parameter, PARAMETERS)
        inventory.add(getattr(parameter, "ds_tensor", None), PARAMETERS)
        inventory.add(parameter.grad, GRADIENTS)
    for buffer in engine.module.buffers():
        inventory.add(buffer, PARAMETERS)
    optimizer = engine.optimizer
    if optimizer is None:
        return inventory
    inner = getattr(optimizer, "optimizer", None) or optimizer
    for tensor in _iter_tensors(getattr(inner, "state", None)):
        inventory.add(tensor, OPTIMIZER_STATE)
    for group in getattr(inner, "param_groups", ()):
        for weight in group.get("params", ()):
            inventory.add(weight, MASTER_WEIGHTS)
            inventory.add(weight.grad, GRADIENTS)
    by_category = sorted(getattr(optimizer, "__dict__", {}).items(), key=lambda entry: _find_category(entry[0]) == BUFFERS)
    for name, value in by_category:
        for tensor in _iter_tensors(value):
            inventory.add(tensor, _find_category(name))
            if tensor.is_leaf:
                inventory.add(tensor.grad, GRADIENTS)
    return inventory


def build_loop_inventory(modules: Sequence[Any], optimizers: Sequence[Any]) -> Inventory:
    """Return the tensors of a loop's models and optimizers."""
    inventory = Inventory()
    references = tensor_parts.list_reference_parameters(modules, optimizers)
    for module in modules:
        with suppress_own(Exception):  # an unknown version of FSDP: its shards are among the parameters below
            for group in sharding.find_groups(module):
                _add_group(inventory, group)
        for parameter in module.parameters():
            _add_parameter(inventory, parameter, trains=parameter.requires_grad and id(parameter) not in references)
        for buffer in module.buffers():
            inventory.add(buffer, PARAMETERS)
        inventory.hidden_sizes.setdefault(GRADIENT_BUCKETS, []).extend(_read_bucket_sizes(module))
    for number, optimizer in enumerate(optimizers):
        inventory.optimizers.append(type(optimizer).__name__)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _add_parameter(inventory, parameter, trains=parameter.requires_grad)
        for tensor in _iter_tensors(optimizer.state):
            inventory.add(tensor, OPTIMIZER_STATE, number)
    return inventory


def _add_group(inventory: Inventory, group: sharding.ShardedGroup) -> None:
    for category, tensors in ((GRADIENTS, group.gradients), (UNSHARDED_PARAMETERS, group.gathered)):
        for tensor in tensors:
            inventory.add(tensor, category)
    for shard, trains in group.shards:
        inventory.add(shard, PARAMETERS if trains else FROZEN_PARAMETERS)


def _add_parameter(inventory: Inventory, parameter: Any, *, trains: bool) -> None:
    category = PARAMETERS if trains else FROZEN_PARAMETERS
    if tensor_parts.is_quantized(parameter):
        category = QUANTIZED_PARAMETERS
        for tensor in tensor_parts.iter_constants(parameter):
            inventory.add(tensor, category)
    inventory.add(parameter, category)
    inventory.add(parameter.grad, GRADIENTS)


def _read_bucket_sizes(module: Any) -> list[int]:
    """Return the bytes of each gradient bucket of a DistributedDataParallel that the gradients are no views of."""
    read = getattr(module, "_get_ddp_logging_data", None)
    if read is None or getattr(module, "gradient_as_bucket_view", False):
        return []
    facts = read()
    sizes = facts.get("rebuilt_bucket_sizes") or facts.get("bucket_sizes") or ""
    return [int(size) for size in str(sizes).replace(" ", "").split(",") if size]


def _find_category(name: str) -> str:
    return next((category for part, category in _CATEGORY_BY_NAME if part in name), BUFFERS)


def _iter_tensors(value: Any) -> Iterator[Any]:
    """Iterate over the tensors in containers and in objects of DeepSpeed's classes, except modules."""
    torch = sys.modules["torch"]
    pending: list[tuple[Any, int]] = [(value, 0)]
    visited: set[int] = set()
    while pending and len(visited) < _MAX_OBJECTS:
        item, depth = pending.pop()
        if isinstance(item, torch.Tensor):
            yield item
            continue
        if depth == _MAX_DEPTH or id(item) in visited:
            continue
        visited.add(id(item))
        pending += [(child, depth + 1) for child in _list_children(item, torch)]


def _list_children(item: Any, torch: Any) -> list[Any]:
    if isinstance(item, dict):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
    if isinstance(item, (torch.nn.Module, type)) or not type(item).__module__.startswith("deepspeed."):
        return []
    return list(getattr(item, "__dict__", {}).values())


def build_facts(build: Callable[[], Inventory], device: int | None, find_held: FindHeld | None = None) -> dict[str, Any]:
    """Return the facts of the ``tensors`` event; ``device`` is the CUDA ordinal, None without CUDA.

    ``find_held``: names the holders of unclaimed blocks.
    """
    begin_ns = time.monotonic_ns()
    inventory = build()
    facts: dict[str, Any] = {
        "host": inventory.sum_host_bytes(),
        "host_pinned": inventory.sum_host_bytes(pinned_only=True),
        "unread": inventory.unread_count,
    }
    torch = sys.modules["torch"]
    segments = None
    if device is not None and find_backend(torch) == NATIVE:
        segments = allocator_snapshot.read_segments(device)
    blocks = allocator_snapshot.list_used_blocks(segments) if segments is not None else None
    if device is not None:
        facts |= _build_device_facts(inventory, blocks, find_held)
        facts["pinned_allocator"] = _read_pinned_allocator()
        facts["contexts"] = _list_other_contexts(torch, device)
    if segments is not None:
        facts["pools"] = allocator_snapshot.sum_pools(segments)
        facts["stream"] = int(torch.cuda.current_stream(device).cuda_stream)
    if len(inventory.optimizers) > 1:
        facts["optimizer_states"] = inventory.sum_by_optimizer(blocks)
    facts["seconds"] = (time.monotonic_ns() - begin_ns) / 1e9
    return facts


def _list_other_contexts(torch: Any, device: int) -> list[int]:
    """Return the ordinals of other devices on which this process has a context, which takes memory there."""
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None:
        return []
    return [other for other in range(torch.cuda.device_count()) if other != device and has_context(other)]


def _build_device_facts(inventory: Inventory, blocks: dict[int, int] | None, find_held: FindHeld | None) -> dict[str, Any]:
    if blocks is None:
        return {"device": inventory.sum_device_bytes(), "allocated_bytes": None}
    by_category, left = inventory.match_blocks(blocks)
    unclaimed = list(left.values())
    held = find_held(left) if find_held is not None else None
    return {
        "device": by_category,
        "allocated_bytes": sum(blocks.values()),
        "unclaimed_bytes": sum(unclaimed),
        "unclaimed_largest": unclaimed[:_LARGEST_COUNT],
        "unclaimed_groups": _group_sizes(unclaimed),
        **({"held": held} if held is not None else {}),
    }


def _group_sizes(sizes: list[int]) -> list[list[int]]:
    """Return [size, count] of the blocks of each size, of those sizes that hold the most."""
    counts = Counter(sizes)
    most = sorted(counts, key=lambda size: size * counts[size], reverse=True)[:_LARGEST_COUNT]
    return [[size, counts[size]] for size in most]


def _read_pinned_allocator() -> dict[str, int] | None:
    """Return bytes of PyTorch's allocator for pinned host memory, which rounds up to powers of two; None if unavailable."""
    read = getattr(sys.modules["torch"].cuda, "host_memory_stats", None)
    if read is None:
        return None
    stats = read()
    names = {"allocated_bytes": "allocated_bytes.current", "active_bytes": "active_bytes.current"}
    return {name: int(stats[key]) for name, key in names.items() if key in stats}
