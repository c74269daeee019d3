"""What PyTorch's flight recorder says about the collectives of a rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from agents import wait_for
from zerotop_probe.inside.stacks.collectives import parse_dump, read_collectives


def make_entry(number: int, name: str, *, group: str = "0", retired: bool = True, is_p2p: bool = False) -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "is_p2p": is_p2p,
        "process_group": [group, "a description"],
        "profiling_name": f"nccl:{name}",
        "retired": retired,
    }


def test_the_first_collective_that_has_not_ended_is_named() -> None:
    entries = [
        make_entry(1, "all_reduce"),
        make_entry(4, "broadcast", group="7"),
        make_entry(2, "all_reduce", retired=False),
        make_entry(3, "barrier", retired=False),
        make_entry(0, "send", is_p2p=True, retired=False),
    ]
    assert parse_dump({"entries": entries}) == [
        {"group": "0", "called": 3, "waits_for": 2, "name": "all_reduce"},
        {"group": "7", "called": 4, "waits_for": -1, "name": ""},
    ]
    assert parse_dump({}) == []


def test_the_installed_pytorch_is_asked() -> None:
    assert read_collectives() == []  # no process group is there
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(3):
            dist.all_reduce(torch.ones(2))

        def have_all_ended() -> bool:  # gloo's own thread notes the end after the caller has gone on
            groups = read_collectives()
            # Older versions keep no record of gloo's collectives.
            return not groups or (groups[0]["called"], groups[0]["waits_for"]) == (3, -1)

        wait_for(have_all_ended)
    finally:
        dist.destroy_process_group()
