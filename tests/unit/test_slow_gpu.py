"""A rank that is the last to begin the collectives: written into a clean real recording of four GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recordings
from zerotop.analysis.annotations import Annotation, find_annotations
from zerotop.session.reader import Session

NAME, SLOW, BLOCK, BLOCKS = "x4-attached", 2, 16, 64
RANKS = range(4)
# The recording's iterations of 2.8 s have so many collectives here.
ITERATION_S, PER_ITERATION = 2.8, 320
EVERY_NS = round(ITERATION_S * 1e9 / PER_ITERATION)


def write_looks(
    folder: Path, times_s: tuple[float, ...], wait_s: float, *, late_s: float = 0.0, chance: int = 0, **changes: Any
) -> None:
    """Let all ranks look at their collectives at some seconds of the recording.

    The slow rank begins each collective so much later that the others wait ``wait_s`` in an iteration, and its CPU launches
    them ``late_s`` later. ``chance``: the last rank is another one in each look.
    """
    session = Session.open(folder)
    for number, second in enumerate(times_s):
        slow = SLOW if not chance else (SLOW + number) % 4
        for source in session.sources["spans"]:
            (path,) = folder.glob(f"events-rank{source.rank}-*.jsonl")
            unix_ns = session.begin_ns + round(second * 1e9)
            first = round(second * 1e9 / EVERY_NS / BLOCK)
            waited = 0.0 if source.rank == slow else wait_s / PER_ITERATION
            noise = np.random.default_rng(source.rank).uniform(0.9, 1.1, BLOCKS)
            launched = unix_ns - (BLOCKS - np.arange(BLOCKS)) * BLOCK * EVERY_NS
            group: dict[str, Any] = {
                "group": "0",
                "ranks": list(RANKS),
                "numbers": list(range(first, first + BLOCKS)),
                "launched_ns": [int(one - source.offset_ns + (source.rank == slow) * late_s * 1e9) for one in launched],
                "bytes": [10**8] * BLOCKS,
                "spent_ns": {"all_gather": [round(BLOCK * (1e5 + waited * 1e9) * one) for one in noise]},
            } | changes
            event = {
                "time_ns": unix_ns + source.rank * 10**7 - source.offset_ns,
                "event": "collective_times",
                "block": BLOCK,
                "groups": [group],
            }
            with open(path, "a") as file:
                file.write(json.dumps(event) + "\n")


def find_slow(folder: Path) -> list[Annotation]:
    session = Session.open(folder)
    return [finding for finding in find_annotations(session, session.end_ns) if finding.name == "slow_gpu"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return recordings.as_directory(NAME, tmp_path)


def test_a_gpu_that_takes_longer(folder: Path) -> None:
    write_looks(folder, (50.0, 60.0, 75.0), 0.4)
    (slow,) = find_slow(folder)
    assert slow.headline.endswith(f" ms of each iteration for the GPU of rank {SLOW}")
    assert slow.ranks == (SLOW,)
    assert slow.evidence["wait_s"] == pytest.approx(0.4, rel=0.1)
    assert slow.cost == pytest.approx(0.4 / ITERATION_S, rel=0.2)
    assert slow.fix == f"nvidia-smi -q -d CLOCK,PERFORMANCE,PIDS -i {SLOW}"
    session = Session.open(folder)
    assert slow.known_ns - session.begin_ns == pytest.approx(65e9, abs=1e9)  # with the second look
    assert slow.name not in [finding.name for finding in find_annotations(session, slow.known_ns - 1)]


def test_a_rank_whose_cpu_is_late_too(folder: Path) -> None:
    write_looks(folder, (50.0, 60.0), 0.4, late_s=0.4 / PER_ITERATION)
    (slow,) = find_slow(folder)
    assert slow.headline.endswith(f"iteration for rank {SLOW}")
    assert "its CPU launches them later, too" in slow.details


@pytest.mark.parametrize("wait_s", [0.0, 0.1])
def test_ranks_that_hardly_wait(folder: Path, wait_s: float) -> None:
    write_looks(folder, (50.0, 60.0, 75.0), wait_s)
    assert find_slow(folder) == []


def test_another_rank_in_each_look(folder: Path) -> None:
    write_looks(folder, (50.0, 60.0, 75.0), 0.4, chance=1)
    assert find_slow(folder) == []


def test_one_look_is_not_enough(folder: Path) -> None:
    write_looks(folder, (60.0,), 0.4)
    assert find_slow(folder) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": [0, 1]},
        {"ranks": []},
        {"numbers": [1, 2]},
        {"spent_ns": {}},
        {"spent_ns": {"all_gather": [1]}},
        {"numbers": []},
    ],
    ids=str,
)
def test_groups_that_are_not_those_of_all_ranks_or_damaged(folder: Path, changes: dict[str, Any]) -> None:
    write_looks(folder, (50.0, 60.0), 0.4, **changes)
    assert find_slow(folder) == []


def test_a_rank_that_has_not_looked(folder: Path) -> None:
    write_looks(folder, (50.0, 60.0), 0.4)
    (path,) = folder.glob("events-rank1-*.jsonl")
    kept = [line for line in path.read_text().splitlines(keepends=True) if "collective_times" not in line]
    path.write_text("".join(kept))
    assert find_slow(folder) == []
