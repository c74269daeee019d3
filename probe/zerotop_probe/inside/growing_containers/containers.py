"""Find lists, dicts, sets, deques and caches of functions that have become longer; estimate the memory of new entries.

Nothing of the job is kept alive between two looks, and no code of the job runs: only built-in types are looked into.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from zerotop_probe.recording.interruptions import suppress_own

_BUILT_IN = (str, bytes, bytearray, int, float, complex, list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict)
# Containers that are measured: those with most new entries. Shorter ones are left out. Of the others the newest entries are
# measured, up to this number; of a list within an entry up to this number of values, and up to this number in all.
_MOST_MEASURED, _LEAST_LENGTH = 100, 4
_MOST_ENTRIES = 16
_MOST_WITHIN = 64
# Views are told if they keep at least so many blocks: a single one, such as all of the data, may be there anyway.
_FEWEST_VIEWED = 3
_MOST_VALUES = 5000
CACHED = type(lru_cache(maxsize=None)(int))
"""The type of functions with an lru_cache. Without a limit it keeps its results in a dict, which the collector lists."""
_KINDS = frozenset(map(id, (list, dict, set, deque, OrderedDict, defaultdict, CACHED)))
# With a limit, results are in links, which Python shows through the cache alone; of a larger one nothing is read.
_MOST_CACHED = 100_000


def _find_link_type() -> type | None:
    """Return the type of the links of a cache; None where another Python keeps results otherwise."""
    cached = lru_cache(maxsize=1)(int)
    cached()
    found = [one for one in gc.get_referents(cached) if type(one) is dict and "__wrapped__" not in one]
    return next((type(link) for one in found for link in one.values()), None)


_LINK = _find_link_type()


class ContainerGrowth(NamedTuple):
    """A container that has become longer."""

    container: Any
    length: int
    added: int  # entries
    added_bytes: int  # estimated, of host memory
    entry: str  # name of the type of the newest entry
    keeps_graph: bool  # an entry is a tensor with the graph that has computed it
    viewed_bytes: int  # of added_bytes, what tensors show that are views of larger memory and keep all of that; 0 for none


def measure_lengths(untracked: Iterable[Any] = ()) -> dict[int, int]:
    """Map the id() of each container that the garbage collector tracks, and of others, to its length."""
    containers = (*_list_containers(), *untracked)
    return {id(one): len(one) if type(one) is not CACHED else measure_length(one) for one in containers}


def measure_length(container: Any) -> int:
    """Return the number of entries of a container, or of results of a cache that has a limit; else 0."""
    if type(container) is not CACHED:
        return len(container)
    return CACHED.cache_info(container).currsize if read_limit(container) is not None else 0


def read_limit(container: Any) -> int | None:
    """Return the most entries of a cache or deque; None for other containers, and without a limit."""
    if type(container) is deque:
        return container.maxlen
    return CACHED.cache_info(container).maxsize if type(container) is CACHED else None


def find_growing(before: Mapping[int, int], untracked: Iterable[Any] = ()) -> list[ContainerGrowth]:
    """Return the containers with most new entries, largest content of new entries first."""
    longer: list[tuple[int, Any]] = []
    for one in (*_list_containers(), *untracked):
        length = len(one) if type(one) is not CACHED else measure_length(one)
        added = length - before.get(id(one), length)
        if added > 0 and one is not before and one is not longer:
            longer.append((added, one))
    growing = []
    for added, one in sorted(longer, key=lambda pair: pair[0], reverse=True)[:_MOST_MEASURED]:
        with suppress_own(RuntimeError):  # another thread changes it
            growing.append(_measure_growth(one, added))
    return sorted(growing, key=lambda growth: (growth.keeps_graph, growth.added_bytes), reverse=True)


def _list_containers() -> list[Any]:
    # By id(): to look a type up in a set would call the hash of the job's metaclasses.
    return [
        one
        for one in gc.get_objects()
        if id(type(one)) in _KINDS and (len(one) if type(one) is not CACHED else measure_length(one)) >= _LEAST_LENGTH
    ]


def _measure_growth(container: Any, added: int) -> ContainerGrowth:
    newest = _read_newest(container, min(added, _MOST_ENTRIES))
    size, keeps_graph, viewed = _measure_entries(newest)
    name = type(newest[0]).__name__ if newest else ""
    times = added / max(1, len(newest))
    length, added_bytes = measure_length(container), round(size * times)
    return ContainerGrowth(container, length, added, added_bytes, name, keeps_graph, round(viewed * times))


def _read_newest(container: Any, count: int) -> list[Any]:
    kind = type(container)
    if kind is list:
        newest: list[Any] = container[: -count - 1 : -1]
        return newest
    if kind is CACHED:
        return _read_results(container)[: -count - 1 : -1]
    if kind is set:
        return list(islice(container, count))  # in no order
    return list(islice(reversed(container if kind is deque else container.values()), count))


def _read_results(cached: Any) -> list[Any]:
    """Return the results in a cache that has a limit, the newest last."""
    if measure_length(cached) > _MOST_CACHED:
        return []
    held = gc.get_referents(cached)  # of each link the arguments, the result and its type; then what the cache needs itself
    return [result for result, kind in zip(held, held[1:]) if kind is _LINK][: measure_length(cached)]


def _measure_entries(entries: list[Any]) -> tuple[float, bool, float]:
    """Return about how much host memory entries hold, whether one is a tensor that keeps its graph, and what views show.

    Objects in two of them count once. In long nested lists, some entries stand for all. The last is 0 unless most of the
    memory is that of several tensors of which views show at most half.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    tensors = (getattr(torch, "Tensor", None), getattr(getattr(torch, "nn", None), "Parameter", None))
    array = getattr(numpy, "ndarray", None)
    seen = {id(entry) for entry in entries}
    waiting = deque((entry, 1.0) for entry in entries)
    size, keeps_graph, held, shown = 0.0, False, 0.0, 0.0
    storages: set[int] = set()
    for _ in range(_MOST_VALUES):
        if not waiting:
            break
        value, weight = waiting.popleft()
        kind = type(value)
        if kind is tensors[0] or kind is tensors[1]:
            if value.device.type == "cpu":
                storage = value.untyped_storage()
                new = weight * storage.nbytes() * (storage.data_ptr() not in storages)
                size, held, shown = size + new, held + new, shown + weight * value.numel() * value.element_size()
                storages.add(storage.data_ptr())
                keeps_graph |= value.grad_fn is not None
        elif kind is array:
            size += weight * value.nbytes
        else:
            size += weight * _measure_shallowly(value)
            within, count = _list_within(value)
            for one in within:
                if id(one) not in seen:
                    seen.add(id(one))
                    waiting.append((one, weight * count / len(within)))
    is_viewed = len(storages) >= _FEWEST_VIEWED and shown <= held / 2 and held >= size / 2
    return size, keeps_graph, shown if is_viewed else 0.0


def _measure_shallowly(value: Any) -> int:
    kind = type(value)
    return sys.getsizeof(value) if any(kind is one for one in _BUILT_IN) else object.__sizeof__(value)


def _list_within(value: Any) -> tuple[list[Any], int]:
    """Return some of the values that a value holds, and how many there are."""
    kind = type(value)
    if kind is list or kind is tuple or kind is set or kind is deque:
        return list(islice(value, _MOST_WITHIN)), len(value)
    if kind is dict or kind is OrderedDict or kind is defaultdict:
        return list(islice(value.values(), _MOST_WITHIN)), len(value)
    if issubclass(kind, tuple):  # a named one; not by methods of its own
        return list(islice(tuple.__iter__(value), _MOST_WITHIN)), tuple.__len__(value)
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return [], 0
    return _list_within(attributes) if type(attributes) is dict else ([], 0)
