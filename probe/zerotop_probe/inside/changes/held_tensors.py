"""Name what keeps device memory that belongs to no model or optimizer: variables and lists with tensors, and views in them.

A search visits all objects of the process, as the look for growing containers does: rarely, and never in a step.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from itertools import islice
from types import FrameType, ModuleType
from typing import Any

from zerotop_probe.inside.growing_containers.names import OwnerPlace, find_place
from zerotop_probe.inside.stacks.code_positions import find_additions
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.recording.interruptions import suppress_own

# Holders that are named, the tensors of one that are named each, and objects that are searched for its name.
_MOST_NAMED = 4
_MOST_REFERRERS = 200
# A view keeps more than its own if its block is this many times as large.
_VIEW_FACTOR = 2


def describe_held(unclaimed: Mapping[int, int], frame: FrameType | None) -> list[dict[str, Any]]:
    """Return the holders of the most bytes, as ``held`` of the event ``tensors``.

    Args:
        unclaimed: address -> size of blocks in no category.
        frame: the innermost of the thread that trains.
    """
    tensors = _list_tensors(unclaimed)
    if not tensors:
        return []
    paths, holders = PathNames.for_this_process(), _group_by_holder(tensors)
    largest = sorted(holders, key=lambda one: _sum_blocks(one[1], unclaimed), reverse=True)
    described: dict[OwnerPlace, dict[str, Any]] = {}
    for holder, kept in islice(largest, 2 * _MOST_NAMED):
        place = find_place(holder, frame, paths)
        if place is not None and place not in described and len(described) < _MOST_NAMED:
            described[place] = _describe_holder(place, holder, kept, unclaimed, frame, paths)
    return list(described.values())


def _list_tensors(unclaimed: Mapping[int, int]) -> list[tuple[Any, int]]:
    """Return the tensors in these blocks, each with its block's address. Subclasses may run code of the job: left out."""
    torch = sys.modules["torch"]
    kinds = {id(torch.Tensor), id(torch.nn.Parameter)}
    found = []
    for one in [one for one in gc.get_objects() if id(type(one)) in kinds]:
        with suppress_own(Exception):  # one without a storage, as within a transformation of a function
            if (
                one.is_cuda
                and one.layout is torch.strided
                and (address := int(one.untyped_storage().data_ptr())) in unclaimed
            ):
                found.append((one, address))
    return found


def _group_by_holder(tensors: list[tuple[Any, int]]) -> list[tuple[Any, list[tuple[Any, int]]]]:
    """Return the objects that refer to the tensors, with the tensors; a tensor in a variable stands for itself."""
    known = {id(tensor): (tensor, address) for tensor, address in tensors}
    own = {id(tensors), id(known)}
    pairs = {id(pair) for pair in (*tensors, *known.values())}
    groups: list[tuple[Any, list[tuple[Any, int]]]] = []
    for holder in islice(gc.get_referrers(*(tensor for tensor, _ in tensors)), _MOST_REFERRERS):
        kind = type(holder)
        if id(holder) in own or isinstance(holder, FrameType):
            continue
        if kind is list or kind is tuple or kind is set:
            values = list(holder)
        elif isinstance(holder, dict):
            values = list(dict.values(holder))
        else:
            continue
        kept = [known[id(value)] for value in values if id(value) in known]
        if not kept or id(holder) in pairs:
            continue
        if _is_scope(holder):
            groups += [(tensor, [(tensor, address)]) for tensor, address in kept]
        else:
            groups.append((holder, kept))
    grouped = {id(tensor) for _, kept in groups for tensor, _ in kept}
    return groups + [(tensor, [(tensor, address)]) for tensor, address in tensors if id(tensor) not in grouped]


def _is_scope(holder: Any) -> bool:
    """Whether a dict holds the variables of a module."""
    name = holder.get("__name__") if type(holder) is dict else None
    module = sys.modules.get(name) if type(name) is str else None
    return isinstance(module, ModuleType) and vars(module) is holder


def _sum_blocks(kept: list[tuple[Any, int]], unclaimed: Mapping[int, int]) -> int:
    return sum(unclaimed[address] for address in {address for _, address in kept})


def _describe_holder(
    place: OwnerPlace,
    holder: Any,
    kept: list[tuple[Any, int]],
    unclaimed: Mapping[int, int],
    frame: FrameType | None,
    paths: PathNames,
) -> dict[str, Any]:
    tensor, address = max(kept, key=lambda one: unclaimed[one[1]])
    facts = {**place._asdict(), "kind": type(holder).__name__, "count": len(kept)}
    facts |= {"bytes": _sum_blocks(kept, unclaimed), "keeps_graph": any(one.grad_fn is not None for one, _ in kept)}
    own_bytes, block_bytes = int(tensor.numel()) * int(tensor.element_size()), unclaimed[address]
    facts |= {"shape": list(tensor.shape), "block_bytes": block_bytes}
    if block_bytes >= _VIEW_FACTOR * max(1, own_bytes):
        facts["view_of"] = _find_base_shape(tensor)
    places = find_additions(place.name, frame, paths)
    if len(places) == 1:
        facts |= {"added_file": places[0].file, "added_line": places[0].line, "added_function": places[0].function}
    return facts


def _find_base_shape(tensor: Any) -> list[int]:
    """Return the shape of the tensor that a view is of, which its strides show; else the elements of its storage."""
    elements = int(tensor.untyped_storage().nbytes()) // max(1, int(tensor.element_size()))
    shape: list[int] = []
    inner = 1  # elements that the dimensions so far make one step over
    for size, stride in sorted(zip(tensor.shape, tensor.stride()), key=lambda one: (one[1], one[0])):
        if size > 1:
            if stride % inner:
                return [elements]
            # One index was chosen of a dimension in between.
            shape += [stride // inner] if stride > inner else []
            shape.append(size)
            inner = stride * size
    if not inner or elements % inner:
        return [elements]
    shape += [elements // inner] if elements > inner else []
    return [int(size) for size in reversed(shape)]
