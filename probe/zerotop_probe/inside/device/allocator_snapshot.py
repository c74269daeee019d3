"""Read the blocks of PyTorch's allocator. A snapshot takes milliseconds: for rare moments only."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

# A segment counts as almost free if at most this part of it is in use.
_ALMOST_FREE = 0.1
_MOST_POOLS = 16


def read_segments(device: int) -> list[dict[str, Any]]:
    """Return the segments of a device, as PyTorch describes them."""
    return list(_iter_segments(device))


def _iter_segments(device: int) -> Iterator[dict[str, Any]]:
    memory_snapshot = sys.modules["torch"].cuda.memory_snapshot
    try:
        segments = memory_snapshot(include_traces=False)
    except TypeError:  # torch before 2.12 has no such argument
        segments = memory_snapshot()
    return (segment for segment in segments if segment["device"] == device)


def list_used_blocks(segments: Iterable[dict[str, Any]]) -> dict[int, int]:
    """Return address -> size of every block that holds a tensor."""
    sizes = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                sizes[address] = block["size"]
            address += block["size"]
    return sizes


def sum_pools(segments: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the bytes of each stream and private pool: blocks are only handed out to the stream and pool of their segment.

    ``stream`` is the number of the driver's handle, 0 for the default stream; ``private``: of a CUDA graph or a MemPool.
    """
    pools: dict[tuple[int, bool], dict[str, Any]] = {}
    for segment in segments:
        is_private = any(segment.get("segment_pool_id") or ())
        key = int(segment.get("stream") or 0), is_private
        pool = pools.setdefault(key, {"stream": key[0], "private": is_private, "reserved": 0, "allocated": 0, "sparse": 0})
        size, used = int(segment["total_size"]), int(segment["allocated_size"])
        pool["reserved"] += size
        pool["allocated"] += used
        if 0 < used <= _ALMOST_FREE * size and not segment.get("is_expandable"):
            pool["sparse"] += size - used
    return sorted(pools.values(), key=lambda pool: int(pool["reserved"]), reverse=True)[:_MOST_POOLS]


def find_largest_free(device: int) -> int:
    """Return the size in bytes of the largest unused block that PyTorch reserves."""
    blocks = (block for segment in _iter_segments(device) for block in segment["blocks"])
    return max((block["size"] for block in blocks if block["state"] == "inactive"), default=0)
