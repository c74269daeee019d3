"""Read from PyTorch's flight recorder which collectives a rank has called, and which one has not ended.

It counts the collectives of each process group: ranks that hang have called different ones, or different numbers of them.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
from collections import deque
from typing import Any

from zerotop_probe.inside.stacks.paths import PathNames

# NCCL's own, and that of the other backends, from PyTorch 2.6 on.
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_STACK_DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")
_MOST_GROUPS = 16
# How many of the last collectives of a group are recorded, and for how many groups.
_MOST_CALLS, _MOST_CALLED_GROUPS = 16, 4
_NONE = -1


def read_collectives() -> list[dict[str, Any]]:
    """Return one entry for each process group, see the event ``stacks``; none if PyTorch has no flight recorder."""
    distributed = sys.modules.get("torch.distributed")
    module = getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)
    if distributed is None or module is None or not distributed.is_initialized():
        return []
    found: list[dict[str, Any]] = []
    for name in _DUMPS:
        # No part of PyTorch's interface: stacks without collectives are better than none.
        with contextlib.suppress(AttributeError, RuntimeError, TypeError, ValueError):
            found += parse_dump(json.loads(getattr(module, name)(includeCollectives=True, onlyActive=False)))
    return found[:_MOST_GROUPS]


def read_calls(paths: PathNames) -> list[dict[str, Any]]:
    """Return the last collectives of each process group with the lines that called them, see the event ``stacks``.

    The first call takes PyTorch seconds to name the lines; other threads continue.
    """
    module = getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)
    found: list[dict[str, Any]] = []
    for name in _STACK_DUMPS:
        with contextlib.suppress(AttributeError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError):
            dump = getattr(module, name)(includeCollectives=True, includeStackTraces=True, onlyActive=False)
            found += parse_calls(pickle.loads(dump), paths)  # made by this process
    return found


def parse_calls(recorded: dict[str, Any], paths: PathNames) -> list[dict[str, Any]]:
    """Return the last collectives of each group of a flight recorder's dump, in order."""
    groups: dict[str, deque[dict[str, Any]]] = {}
    for entry in recorded.get("entries") or ():
        if entry.get("is_p2p") or not isinstance(entry.get("collective_seq_id"), int):
            continue
        group = str((entry.get("process_group") or [""])[0])
        name = str(entry.get("profiling_name") or "").rpartition(":")[2]
        call: dict[str, Any] = {"group": group, "number": entry["collective_seq_id"], "name": name}
        shape = next(iter(entry.get("input_sizes") or ()), None)
        if isinstance(shape, (list, tuple)) and all(isinstance(size, int) for size in shape):
            call["shape"] = list(shape)
        calls = groups.pop(group, deque(maxlen=_MOST_CALLS))
        calls.append({**call, **_find_own_line(entry.get("frames") or (), paths)})
        groups[group] = calls
    return [call for calls in list(groups.values())[-_MOST_CALLED_GROUPS:] for call in calls]


def _find_own_line(frames: Any, paths: PathNames) -> dict[str, Any]:
    """Return the innermost line of the job's own code; empty without one."""
    for frame in frames:
        file = paths.name_file(str(frame.get("filename") or ""))
        if file is not None and file.is_own and isinstance(frame.get("line"), int):
            return {"file": file.text, "line": frame["line"], "function": str(frame.get("name") or "")}
    return {}


def parse_dump(recorded: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries for the groups of a flight recorder's dump, in the order in which they were last used."""
    groups: dict[str, dict[str, Any]] = {}
    for entry in recorded.get("entries") or ():
        if entry.get("is_p2p") or not isinstance(entry.get("collective_seq_id"), int):
            continue
        name = str((entry.get("process_group") or [""])[0])
        number, called = entry["collective_seq_id"], str(entry.get("profiling_name") or "").rpartition(":")[2]
        group = groups.pop(name, {"group": name, "called": 0, "waits_for": _NONE, "name": ""})
        group["called"] = max(group["called"], number)
        if not entry.get("retired") and group["waits_for"] == _NONE:
            group.update(waits_for=number, name=called)
        groups[name] = group
    return list(reversed(list(groups.values())))
