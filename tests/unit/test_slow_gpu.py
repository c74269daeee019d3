"""A rank that the others' GPUs wait for: written into a clean real recording of four GPUs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import recordings
from changed_recordings import find_named
from zerotop.analysis.findings import detect_findings
from zerotop.recording.reader import Recording

# ZeRO-3, with iterations of 0.63 s.
NAME, SLOW, ITERATION_S = "x4-z3", 2, 0.633
WAITS = 100


def test_a_real_gpu_that_has_more_to_do() -> None:
    """FSDP1 on two H200s: from step 10 on rank 1 multiplies matrices besides, for a tenth of an iteration."""
    recording = recordings.open_recording("x2-slow-gpu")
    (slow,) = [one for one in detect_findings(recording, recording.end_ns) if one.name == "slow_gpu"]
    assert slow.headline == "The others wait for the GPU of rank 1, 22 ms or more of each iteration"
    assert slow.step == 64


def write_looks(
    folder: Path,
    wait_s: float,
    *,
    starved: int = 4,
    idle: Sequence[int] = (SLOW,),
    slow: Sequence[int] = (SLOW, SLOW),
    ranks: Sequence[int] = range(4),
    lasts: tuple[int, int] = (9, 4),
    **changes: Any,
) -> list[int]:
    """Let ranks look at four steps twice, in which the others wait so long for one. Return the first step of each look."""
    recording = Recording.open(folder)
    sources = {source.rank: source for source in recording.sources["spans"]}
    last = int(sources[0].array["step"].max())
    firsts = [last - before for before in lasts]
    for rank in ranks:
        source = sources[rank]
        (path,) = folder.glob(f"events-rank{rank}-*.jsonl")
        for number, first in enumerate(firsts):
            ends = source.array["end_ns"][source.array["step"] == first + 4]
            waited = 0.02 if rank == slow[number] else 0.02 + wait_s
            facts: dict[str, Any] = {"waited_ns": [round(waited * factor * 1e9) for factor in (1.0, 0.9, 1.2, 0.9)]}
            facts |= {"first_step": first, "waits": [WAITS] * 4, "starved": [starved if rank in idle else 4] * 4} | changes
            event = {"time_ns": int(ends.max()) + rank * 10**7, "event": "stream_waits", **facts}
            with open(path, "a") as file:
                file.write(json.dumps(event) + "\n")
    return firsts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return recordings.unpack_to_folder(NAME, tmp_path)


def test_a_gpu_that_takes_longer(folder: Path) -> None:
    firsts = write_looks(folder, 0.1)
    (slow,) = find_named(folder, "slow_gpu")
    assert slow.headline == f"The others wait for the GPU of rank {SLOW}, 100 ms or more of each iteration"
    assert (slow.ranks, slow.step) == ((SLOW,), firsts[0])
    assert slow.cost == pytest.approx(0.1 / ITERATION_S, rel=0.1)
    assert slow.fix == f"nvidia-smi -q -d CLOCK,PERFORMANCE,PIDS -i {SLOW}"
    recording = Recording.open(folder)
    assert slow.name not in [finding.name for finding in detect_findings(recording, slow.known_ns - 1)]


def test_a_rank_whose_gpu_is_often_idle(folder: Path) -> None:
    write_looks(folder, 0.1, starved=80)
    (slow,) = find_named(folder, "slow_gpu")
    assert slow.headline == f"The others wait for rank {SLOW}, 100 ms or more of each iteration"
    assert "the CPU launches work too late" in slow.details
    assert slow.fix.startswith("py-spy dump --pid ")


def test_ranks_whose_gpus_are_all_often_idle(folder: Path) -> None:
    write_looks(folder, 0.1, starved=80, idle=range(4))
    assert find_named(folder, "slow_gpu") == []


@pytest.mark.parametrize("wait_s", [0.0, 0.015])
def test_ranks_that_hardly_wait(folder: Path, wait_s: float) -> None:
    write_looks(folder, wait_s)
    assert find_named(folder, "slow_gpu") == []


def test_another_rank_in_each_look(folder: Path) -> None:
    write_looks(folder, 0.1, slow=(1, 2))
    assert find_named(folder, "slow_gpu") == []


def test_a_wait_in_a_single_step(folder: Path) -> None:
    write_looks(folder, 0.0, waited_ns=[10**9, 10, 10, 10])
    assert find_named(folder, "slow_gpu") == []


@pytest.mark.parametrize(
    "changes", [{"waited_ns": []}, {"waited_ns": [1]}, {"first_step": 10**6}, {"waits": [0, 0]}, {"starved": None}], ids=str
)
def test_looks_that_are_damaged(folder: Path, changes: dict[str, Any]) -> None:
    write_looks(folder, 0.1, **changes)
    assert find_named(folder, "slow_gpu") == []


def test_a_rank_that_has_not_looked(folder: Path) -> None:
    write_looks(folder, 0.1, ranks=(0, 2, 3))
    assert find_named(folder, "slow_gpu") == []


def test_a_rank_that_waits_in_item_is_no_straggler() -> None:
    """FSDP2 on two H200s: rank 0 sleeps in its blocks, and rank 1 waits for its own GPU between the phases."""
    recording = recordings.open_recording("x2-slow-launches")
    assert "straggler" not in [one.name for one in detect_findings(recording, recording.end_ns)]


def test_real_links_that_are_slow() -> None:
    """FSDP2 on two H200s, with NCCL over sockets."""
    recording = recordings.open_recording("x2-slow-links")
    (slow,) = [one for one in detect_findings(recording, recording.end_ns) if one.name == "slow_links"]
    assert slow.headline == "All GPUs wait 310 ms of each iteration (50 %) for gathered parameters"
    assert (slow.ranks, slow.step) == ((0, 1), 32)


def test_transfers_that_nothing_hides(folder: Path) -> None:
    firsts = write_looks(folder, 0.0, waited_ns=[2 * 10**8] * 4)
    (slow,) = find_named(folder, "slow_links")
    assert slow.headline == "All GPUs wait 200 ms of each iteration (32 %) for gathered parameters"
    assert (slow.ranks, slow.step) == ((0, 1, 2, 3), firsts[0])
    assert find_named(folder, "slow_gpu") == []


def test_a_rank_that_waits_for_no_transfer(folder: Path) -> None:
    write_looks(folder, 0.3)
    assert find_named(folder, "slow_links") == []


def test_links_that_become_slower(folder: Path) -> None:
    write_looks(folder, 0.0, waited_ns=[10**7] * 4, lasts=(14, 13))
    assert find_named(folder, "slow_links") == []
    write_looks(folder, 0.0, waited_ns=[8 * 10**7] * 4)
    (slow,) = find_named(folder, "slow_links")
    assert slow.headline == "All GPUs wait 80 ms of each iteration for gathered parameters, 10 ms before"
    assert slow.cost == pytest.approx(0.07 / ITERATION_S, rel=0.1)


def test_long_transfers_that_become_longer(folder: Path) -> None:
    write_looks(folder, 0.0, waited_ns=[12 * 10**7] * 4, lasts=(14, 13))
    (slow,) = find_named(folder, "slow_links")
    assert slow.headline == "All GPUs wait 120 ms of each iteration (19 %) for gathered parameters"
    write_looks(folder, 0.0, waited_ns=[3 * 10**8] * 4)
    first, slower = find_named(folder, "slow_links")
    assert first == slow
    assert slower.headline == "All GPUs wait 300 ms of each iteration for gathered parameters, 120 ms before"
