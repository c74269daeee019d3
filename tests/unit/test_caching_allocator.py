"""The simulation of PyTorch's caching allocator: its documented rules, and a recorded job's counters."""

from __future__ import annotations

import importlib
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from zerotop.analysis.memory.caching_allocator import MIB, AllocatorRules, Block, CachingAllocator, OutOfMemoryError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # A rest of at most 1 MiB is not split off.
        (11 * MIB, 12 * MIB, 12 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(size: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert (allocator.allocated, allocator.reserved, allocator.requested) == (allocated, reserved, size)


def test_the_smallest_fitting_block_is_taken_and_split() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (100, 40, 60)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(30 * MIB).address == blocks[1].address
    assert allocator.allocate(10 * MIB).address == blocks[1].address + 30 * MIB
    assert allocator.reserved == 200 * MIB


def test_free_neighbours_become_one_block() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(90 * MIB))
    parts = [allocator.allocate(30 * MIB) for _ in range(3)]
    for index in (0, 2, 1):
        allocator.free(parts[index])
    assert allocator.allocate(90 * MIB).size == 90 * MIB
    assert (allocator.reserved, allocator.segments) == (90 * MIB, 1)


def test_a_stream_gets_no_blocks_of_another() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(40 * MIB, stream=1))
    allocator.allocate(40 * MIB)
    assert allocator.reserved == 80 * MIB


def test_a_longer_batch_leaves_segments_behind_unless_they_expand() -> None:
    reserved = {}
    for expandable in (False, True):
        allocator = CachingAllocator(AllocatorRules(expandable_segments=expandable))
        for size in (40, 44, 48):  # one batch after the other
            blocks = [allocator.allocate(size * MIB) for _ in range(4)]
            for block in blocks:
                allocator.free(block)
        reserved[expandable] = allocator.reserved
    assert reserved == {False: 4 * (40 + 44 + 48) * MIB, True: 200 * MIB}  # pages of 20 MiB


def test_power_of_two_divisions() -> None:
    """PyTorch's documentation: with four divisions 1200 becomes 1280, and 512 times that here."""
    allocator = CachingAllocator(AllocatorRules(roundup_power2_divisions=4))
    allocator.allocate(512 * 1200)
    assert allocator.allocated == 512 * 1280


def test_blocks_beyond_the_split_size_stay_whole() -> None:
    allocator = CachingAllocator(AllocatorRules(max_split_size=50 * MIB))
    allocator.free(allocator.allocate(100 * MIB))
    allocator.allocate(30 * MIB)  # does not get it
    assert allocator.reserved == 130 * MIB
    assert allocator.allocate(90 * MIB).size == 100 * MIB
    assert allocator.reserved == 130 * MIB


def test_a_failure_gives_whole_segments_back_and_tries_again() -> None:
    allocator = CachingAllocator(limit=100 * MIB)
    cached = [allocator.allocate(20 * MIB) for _ in range(5)]
    for block in cached[:3]:
        allocator.free(block)
    allocator.allocate(50 * MIB)
    assert (allocator.reserved, allocator.retries) == (90 * MIB, 1)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(20 * MIB)


def test_blocks_between_blocks_in_use_are_stuck() -> None:
    allocator = CachingAllocator(limit=100 * MIB)
    allocator.free(allocator.allocate(100 * MIB))
    allocator.allocate(10 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(95 * MIB)


def test_garbage_collection_gives_old_segments_back() -> None:
    allocator = CachingAllocator(AllocatorRules(garbage_collection_threshold=0.5), limit=200 * MIB)
    for size in (60, 61):
        blocks = [allocator.allocate(size * MIB)]
        allocator.free(blocks[0])
    allocator.allocate(70 * MIB)
    assert allocator.reserved < 200 * MIB - 60 * MIB
    assert allocator.retries == 0


@pytest.mark.parametrize("expandable", [False, True])
def test_sums_hold_for_any_order(expandable: bool) -> None:
    """Everything that was allocated comes back, and the cache then gives it all to the device."""
    generator = random.Random(0)
    allocator = CachingAllocator(AllocatorRules(expandable_segments=expandable))
    alive: list[Block] = []
    for _ in range(3000):
        if alive and generator.random() < 0.5:
            allocator.free(alive.pop(generator.randrange(len(alive))))
        else:
            alive.append(allocator.allocate(int(2 ** generator.uniform(0, 26))))
        spans = sorted((block.address, block.address + block.size) for block in alive)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert allocator.allocated == sum(block.size for block in alive) <= allocator.reserved
    for block in alive:
        allocator.free(block)
    assert allocator.allocated == allocator.requested == 0
    allocator.empty_cache()
    assert allocator.reserved == 0


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("allocator_replay")


def test_recorded_jobs_reserve_what_is_estimated(benchmark: Any) -> None:
    for name in benchmark.JOBS:
        measured, likely = benchmark.estimate_job(name)
        assert likely == pytest.approx(measured, rel=0.05), name


def test_what_if_simulates_both_settings(benchmark: Any) -> None:
    for change, pairs in benchmark.predict_pairs().items():
        assert max(simulated for _, simulated in pairs) < 0.05, change


def test_a_recorded_job_reserves_what_the_simulation_says(benchmark: Any) -> None:
    recording = benchmark.Recording.open(benchmark._RECORDING)
    recording.refresh()
    counted = benchmark.read_counters(recording)
    simulated = list(benchmark.simulate(benchmark.read_operations(recording)))
    assert [(one.moment, one.reserved, one.segments) for one in simulated[:4]] == [
        (one.moment, one.reserved, one.segments) for one in counted
    ]
    assert simulated[4].reserved == counted[3].reserved
