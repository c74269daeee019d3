"""PyTorch's allocator block by block. Some milliseconds a look: for rare moments only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


def _iter_segments(device: int) -> Iterator[dict[str, Any]]:
    memory_snapshot = sys.modules["torch"].cuda.memory_snapshot
    try:
        segments = memory_snapshot(include_traces=False)
    except TypeError:  # before torch 2.12 it takes no such argument
        segments = memory_snapshot()
    return (segment for segment in segments if segment["device"] == device)


def read_used_blocks(device: int) -> dict[int, int]:
    """Address -> size of every block that holds a tensor."""
    found = {}
    for segment in _iter_segments(device):
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                found[address] = block["size"]
            address += block["size"]
    return found


def find_largest_free(device: int) -> int:
    """The largest piece, in bytes, of what PyTorch holds and nobody uses."""
    blocks = (block for segment in _iter_segments(device) for block in segment["blocks"])
    return max((block["size"] for block in blocks if block["state"] == "inactive"), default=0)
