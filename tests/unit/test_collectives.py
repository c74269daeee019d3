"""What PyTorch's flight recorder says about the collectives of a rank."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from agents import wait_for
from zerotop_probe.inside.stacks.collectives import parse_calls, parse_dump, read_calls, read_collectives
from zerotop_probe.inside.stacks.paths import PathNames


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


def test_the_last_collectives_are_reported_with_the_lines_that_called_them() -> None:
    frames = [
        {
            "name": "all_reduce",
            "filename": "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py",
            "line": 9,
        },
        {"name": "sync_gradients", "filename": "/job/train.py", "line": 57},
        {"name": "main", "filename": "/job/train.py", "line": 90},
    ]
    entries = [make_entry(number, "all_reduce") | {"frames": frames} for number in range(1, 30)]
    calls = parse_calls({"entries": [*entries, make_entry(30, "barrier")]}, PathNames("/job", []))
    assert [call["number"] for call in calls] == list(range(15, 31))
    line = {"file": "train.py", "line": 57, "function": "sync_gradients"}
    assert calls[0] == {"group": "0", "number": 15, "name": "all_reduce", **line}
    assert calls[-1] == {"group": "0", "number": 30, "name": "barrier"}
    assert parse_calls({}, PathNames("/job", [])) == []


def test_the_installed_pytorch_says_which_lines_called() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(2))
        line = sys._getframe().f_lineno - 1
        calls = read_calls(PathNames(os.path.dirname(__file__), []))
    finally:
        dist.destroy_process_group()
    # Older versions keep no record of gloo's collectives.
    if calls:
        last = calls[-1]
        assert (last["name"], last["file"], last["line"]) == ("all_reduce", os.path.basename(__file__), line)
