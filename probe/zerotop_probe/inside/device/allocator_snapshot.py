"""Read the blocks of PyTorch's allocator. A snapshot takes milliseconds: for rare moments only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


def _iter_segments(device: int) -> Iterator[dict[str, Any]]:
    memory_snapshot = sys.modules["torch"].cuda.memory_snapshot
    try:
        segments = memory_snapshot(include_traces=False)
    except TypeError:  # torch before 2.12 has no such argument
        segments = memory_snapshot()
    return (segment for segment in segments if segment["device"] == device)


def read_used_blocks(device: int) -> dict[int, int]:
    """Return address -> size of every block that holds a tensor."""
    sizes = {}
    for segment in _iter_segments(device):
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                sizes[address] = block["size"]
            address += block["size"]
    return sizes


def find_largest_free(device: int) -> int:
    """Return the size in bytes of the largest unused block that PyTorch reserves."""
    blocks = (block for segment in _iter_segments(device) for block in segment["blocks"])
    return max((block["size"] for block in blocks if block["state"] == "inactive"), default=0)
