"""Name what keeps device memory that belongs to no model or optimizer: variables that lead to tensors, and views in them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from zerotop_probe.inside.growing_containers.names import OwnerPlace
from zerotop_probe.inside.growing_containers.reachable_values import ReachableValues
from zerotop_probe.inside.guard import now
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.recording.interruptions import suppress_own

# Holders of the most bytes that are named, and those of tensors with graphs, if there are so many in one.
_MOST_NAMED, _MOST_GRAPHS, _SOME_GRAPHS = 4, 2, 3
# A view keeps more than its own if its block is this many times as large.
_VIEW_FACTOR = 2
# Nodes of graphs that are looked into, and the time for that (ns).
_MOST_NODES, _MOST_NS, _CLOCK_EVERY = 20_000, 20_000_000, 64


def describe_held(unclaimed: Mapping[int, int], frame: FrameType | None) -> list[dict[str, Any]]:
    """Return the holders of the most bytes, as ``held`` of the event ``tensors``.

    Args:
        unclaimed: address -> size of blocks in no category.
        frame: the innermost of the thread that trains.
    """
    paths = PathNames.for_this_process()
    holders = sorted(_find_holders(unclaimed, frame, paths), key=lambda one: one.sum_blocks(unclaimed), reverse=True)
    graphs = _Graphs(unclaimed)
    for holder in holders:
        graphs.follow(holder)
    holders.sort(key=lambda one: one.sum_blocks(unclaimed), reverse=True)
    claimed: set[int] = set()
    described = []
    with_graphs = [one for one in holders if one.graphs >= _SOME_GRAPHS and one not in holders[:_MOST_NAMED]]
    for holder in (*holders[:_MOST_NAMED], *with_graphs[:_MOST_GRAPHS]):
        holder.drop_blocks(claimed)
        claimed |= holder.addresses
        if holder.tensors:
            described.append(_describe_holder(holder, unclaimed, frame, paths))
    return described


class _Holder:
    """A variable or attribute, with the tensors that it leads to."""

    def __init__(self, place: OwnerPlace, value: Any) -> None:
        self.place = place
        self.kind = type(value).__name__
        self.tensors: dict[int, tuple[Any, int]] = {}  # by id(), with the addresses of their blocks
        self.graphs = 0  # tensors that keep the blocks of the graph that computed them
        self.graph_blocks: set[int] = set()

    @property
    def addresses(self) -> set[int]:
        return self.graph_blocks | {address for _, address in self.tensors.values()}

    def sum_blocks(self, unclaimed: Mapping[int, int]) -> int:
        return sum(unclaimed[address] for address in self.addresses)

    def drop_blocks(self, claimed: set[int]) -> None:
        """Leave out blocks that are already counted for another holder."""
        self.tensors = {key: one for key, one in self.tensors.items() if one[1] not in claimed}
        self.graph_blocks -= claimed


def _find_holders(unclaimed: Mapping[int, int], frame: FrameType | None, paths: PathNames) -> list[_Holder]:
    """Return the variables that lead to tensors in these blocks. Subclasses of tensors may run code of the job: left out."""
    torch = sys.modules["torch"]
    holders: dict[OwnerPlace, _Holder] = {}
    for tensor, place, root, _ in ReachableValues(frame, paths).visit((torch.Tensor, torch.nn.Parameter)):
        with suppress_own(Exception):  # one without a storage, as within a transformation of a function
            if place is None or tensor.layout is not torch.strided:
                continue
            address = int(tensor.untyped_storage().data_ptr())
            if address in unclaimed:
                holders.setdefault(place, _Holder(place, root)).tensors[id(tensor)] = tensor, address
    return list(holders.values())


class _Graphs:
    """Finds the blocks that graphs keep for a backward."""

    def __init__(self, unclaimed: Mapping[int, int]) -> None:
        self._unclaimed = unclaimed
        self._nodes: dict[int, Any] = {}  # seen ones, kept so that their id() is not used again
        self._saved_names: dict[type, list[str]] = {}
        self._deadline_ns = now() + _MOST_NS

    def follow(self, holder: _Holder) -> None:
        for tensor, _ in holder.tensors.values():
            node = tensor.grad_fn
            if node is not None and id(node) not in self._nodes:
                blocks, is_alive = self._read_graph(node)
                holder.graph_blocks |= blocks
                holder.graphs += is_alive

    def _read_graph(self, root: Any) -> tuple[set[int], bool]:
        """Return the blocks of a graph, as far as there is time; and whether it keeps any, which no backward has freed."""
        blocks: set[int] = set()
        waiting, is_alive = [root], False
        while waiting:
            node = waiting.pop()
            is_clock = len(self._nodes) % _CLOCK_EVERY == 0
            if len(self._nodes) >= _MOST_NODES or (is_clock and now() > self._deadline_ns):
                break
            self._nodes[id(node)] = node
            for name in self._list_saved(type(node), node):
                value: Any = getattr(getattr(node, name), "data", None)
                is_alive |= value is not None
                if type(value) is sys.modules["torch"].Tensor:
                    with suppress_own(Exception):
                        address = int(value.untyped_storage().data_ptr())
                        blocks |= {address} & self._unclaimed.keys()
            waiting += [one for one, _ in node.next_functions if one is not None and id(one) not in self._nodes]
        return blocks, is_alive

    def _list_saved(self, kind: type, node: Any) -> list[str]:
        """Return the names of a node's saved tensors that are no lists; those of functions written in Python are unknown."""
        if kind not in self._saved_names:
            names = [name for name in dir(kind) if name.startswith("_raw_saved_")]
            self._saved_names[kind] = [name for name in names if not _is_list(node, name)]
        return self._saved_names[kind]


def _is_list(node: Any, name: str) -> bool:
    """Return whether a node saves a list of tensors; reading one that a backward has freed raises, unlike one tensor."""
    try:
        return isinstance(getattr(node, name), (tuple, list))
    except RuntimeError:
        return True


def _describe_holder(
    holder: _Holder, unclaimed: Mapping[int, int], frame: FrameType | None, paths: PathNames
) -> dict[str, Any]:
    tensor, address = max(holder.tensors.values(), key=lambda one: unclaimed[one[1]])
    facts = {**holder.place._asdict(), "kind": holder.kind, "count": len(holder.tensors)}
    facts |= {"bytes": holder.sum_blocks(unclaimed), "keeps_graph": bool(holder.graphs)}
    own_bytes, block_bytes = int(tensor.numel()) * int(tensor.element_size()), unclaimed[address]
    facts |= {"shape": list(tensor.shape), "block_bytes": block_bytes}
    if block_bytes >= _VIEW_FACTOR * max(1, own_bytes):
        facts["view_of"] = find_base_shape(tensor)
    places = holder.place.find_additions(frame, paths) if len(holder.tensors) > 1 else []
    if len(places) == 1:
        facts |= {"added_file": places[0].file, "added_line": places[0].line, "added_function": places[0].function}
    return facts


def find_base_shape(tensor: Any) -> list[int]:
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
