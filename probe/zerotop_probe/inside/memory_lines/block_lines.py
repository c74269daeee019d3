"""Name the lines that allocated the blocks that stay after a step, or that were alive at its peak.

From PyTorch's history of one or two steps. A block stays if a step has allocated it and the next one has not freed it;
blocks that replace older ones of their size do not count. Blocks that backward allocates have no Python stack: PyTorch
allocates them in its own threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from zerotop_probe.inside.stacks.frames import MOST_FRAMES, MOST_LIBRARY_FRAMES, PythonFrame, Stack
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.inside.stacks.tally import format_stacks

Entry = dict[str, Any]
"""One entry of PyTorch's history: action, addr, size, time_us and frames."""

# The largest blocks are examined. Equal ones form groups, of which the largest are recorded, if they matter.
_MOST_BLOCKS = 1000
_MOST_GROUPS = 16
_LEAST_SHARE = 0.01


def describe_staying(history: Sequence[Entry], boundary_us: int, paths: PathNames) -> dict[str, Any]:
    """Return the blocks that stayed, as fields of the event ``memory_lines``.

    ``boundary_us``: the end of the last step but one, in unix microseconds. If the history lacks those before, its first
    half counts.
    """
    if history and history[0]["time_us"] >= boundary_us:
        boundary_us = history[len(history) // 2]["time_us"]
    alive, older = _follow_blocks(history, boundary_us)
    staying = []
    for entry in sorted((one for one in alive if one["time_us"] < boundary_us), key=_get_size, reverse=True):
        if older[entry["size"]] > 0:  # it has taken the place of one that was freed
            older[entry["size"]] -= 1
        else:
            staying.append(entry)
    whole_bytes = sum(map(_get_size, staying))
    return {"staying_bytes": whole_bytes, **_describe(staying, whole_bytes, paths)}


def describe_peak(history: Sequence[Entry], end_bytes: int, paths: PathNames) -> dict[str, Any]:
    """Return the blocks that were alive at the peak, likewise. ``end_bytes``: requested bytes at the end of the history."""
    size, peak_bytes, peak = end_bytes, end_bytes, len(history)
    for index in range(len(history) - 1, -1, -1):
        entry = history[index]
        if entry["action"] == "alloc":
            size -= entry["size"]
        elif entry["action"] == "free_completed":
            size += entry["size"]
        if size > peak_bytes:
            peak_bytes, peak = size, index
    alive, _ = _follow_blocks(history[:peak], 0)
    before_bytes = peak_bytes - sum(map(_get_size, alive))
    return {"peak_bytes": peak_bytes, "before_bytes": before_bytes, **_describe(alive, peak_bytes, paths)}


def _get_size(entry: Entry) -> int:
    return int(entry["size"])


def _follow_blocks(history: Sequence[Entry], boundary_us: int) -> tuple[list[Entry], Counter[int]]:
    """Return the blocks that were not freed, and how many of each size from before the history were freed from a time on."""
    alive: dict[int, Entry] = {}
    older: Counter[int] = Counter()
    for entry in history:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = entry
        elif entry["action"] == "free_completed" and alive.pop(entry["addr"], None) is None:
            older[entry["size"]] += entry["time_us"] >= boundary_us
    return list(alive.values()), older


def _describe(blocks: list[Entry], whole_bytes: int, paths: PathNames) -> dict[str, Any]:
    """Return the largest groups of blocks with the same stack and size, with their stacks."""
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in sorted(blocks, key=_get_size, reverse=True)[:_MOST_BLOCKS]:
        stack = tuple((frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames") or ())
        groups.setdefault((entry["size"], stack), []).append(entry)
    largest = sorted(groups.items(), key=lambda group: group[0][0] * len(group[1]), reverse=True)[:_MOST_GROUPS]
    stacks: list[tuple[Stack, dict[str, Any]]] = []
    for (size, stack), entries in largest:
        if size * len(entries) >= _LEAST_SHARE * whole_bytes:
            facts = {"count": len(entries), "size_bytes": size, "unix_us": entries[0]["time_us"]}
            stacks.append((Stack(_name_frames(stack, paths), ""), facts))
    return format_stacks(stacks)


def _name_frames(stack: Sequence[tuple[str, int, str]], paths: PathNames) -> tuple[PythonFrame, ...]:
    frames: list[PythonFrame] = []
    for path, line, function in stack:
        name = paths.name_file(path)
        if name is not None and len(frames) < (MOST_FRAMES if name.is_own else MOST_LIBRARY_FRAMES):
            frames.append(PythonFrame(name.text, line, function, name.is_own))
    return tuple(frames)
