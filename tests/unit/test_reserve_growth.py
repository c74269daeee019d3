"""A reserve that grows beyond what was ever allocated, in simulated jobs, and one that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import recordings
from changed_recordings import Rows, change_table, find_named
from zerotop.analysis.findings import Severity
from zerotop.analysis.findings.support.memory.looks import describe_larger
from zerotop.analysis.findings.support.memory.reserve_rises import ReserveRise, ReserveSearch
from zerotop.analysis.memory.block_lines import AllocatingLine, LineBlocks, Look
from zerotop.analysis.memory.caching_allocator import MIB, AllocatorRules, CachingAllocator
from zerotop.recording.samples import Samples

GIB = 1 << 30
_FIELDS = [(name, np.int64) for name in ("allocated_bytes", "allocated_peak_bytes", "reserved_bytes", "segments")]
_STEPS = 900
_ONSET = 300

Sizes = Callable[[int, np.random.Generator], list[int]]


def use_larger_blocks(step: int, random: np.random.Generator) -> list[int]:
    """Each fifth step multiplies by a bank that has become larger."""
    more = step - _ONSET
    return [300 * MIB] * 6 + ([(300 + 8 * more) * MIB] if more > 0 and more % 5 == 0 else [])


def use_longer_sequences(step: int, random: np.random.Generator) -> list[int]:
    """Each step has a sequence that is a little longer: several of its blocks fit into no cached one."""
    length = 200 + max(0, step - _ONSET) // 4
    return [2 * length * MIB, length * MIB, 64 * MIB]


def use_equal_batches(step: int, random: np.random.Generator) -> list[int]:
    return [300 * MIB] * 6


def use_other_lengths(step: int, random: np.random.Generator) -> list[int]:
    length = int(random.integers(100, 1000))
    return [length * MIB // 2, length * MIB, 3 * length * MIB // 4, 40 * MIB]


def use_one_large_batch(step: int, random: np.random.Generator) -> list[int]:
    return [300 * MIB] * (40 if step == 500 else 6)


def use_larger_batches(step: int, random: np.random.Generator) -> list[int]:
    return [300 * MIB] * (6 + step // 20)


def run_steps(sizes: Sizes, seed: int, rules: AllocatorRules | None = None) -> Rows:
    """Return a reading of the allocator after each of a job's steps."""
    allocator, random = CachingAllocator(rules), np.random.default_rng(seed)
    allocator.allocate(2 * GIB)
    rows = np.zeros(_STEPS, _FIELDS)
    for step in range(_STEPS):
        allocator.reset_peaks()
        blocks = [allocator.allocate(size) for size in sizes(step, random)]
        for block in blocks:
            allocator.free(block)
        rows[step] = (allocator.allocated, allocator.allocated_peak, allocator.reserved, allocator.segments)
    return rows


def find_rises(rows: Rows, pieces: int = 1) -> Iterator[ReserveRise]:
    """Yield the rises in readings, which the search gets in so many pieces."""
    times = np.arange(len(rows)) + 10
    process: Any = SimpleNamespace(steps={"end_unix_ns": times})
    search = ReserveSearch()
    for part in np.array_split(np.arange(len(rows)), pieces):
        yield from search.find_rises(process, Samples(times[part], rows[part]), GIB)


@pytest.mark.parametrize("sizes", [use_larger_blocks, use_longer_sequences])
def test_blocks_that_fit_into_none_let_the_reserve_grow(sizes: Sizes) -> None:
    rises = list(find_rises(run_steps(sizes, 0)))
    assert rises
    assert rises == list(find_rises(run_steps(sizes, 0), pieces=50))
    assert abs(rises[0].first_steps - _ONSET) <= 30
    assert [one.levels[0] for one in rises] == [rises[0].levels[0]] * len(rises)
    sizes_of_segments = rises[-1].segment_bytes
    assert sizes_of_segments is not None
    assert sizes_of_segments[0] < sizes_of_segments[1]


def test_segments_that_expand_have_room_for_larger_blocks() -> None:
    assert list(find_rises(run_steps(use_larger_blocks, 0, AllocatorRules(expandable_segments=True)))) == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", [use_equal_batches, use_other_lengths, use_one_large_batch, use_larger_batches])
def test_a_reserve_that_settles_or_is_used_is_none(sizes: Sizes, seed: int) -> None:
    assert list(find_rises(run_steps(sizes, seed))) == []


@pytest.mark.parametrize("last", [None, 400])
def test_a_job_whose_reserve_grows(last: int | None, tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("gpu-lines-leak", tmp_path)

    def grow(rows: Rows) -> None:
        step = np.maximum.accumulate(np.maximum(rows["step"], 0).astype(np.int64))
        added = np.clip(step, 100, last) - 100
        for name in ("allocated_bytes", "allocated_peak_bytes"):
            rows[name] = 2 * GIB
        rows["reserved_bytes"] = rows["reserved_peak_bytes"] = 3 * GIB + added * 64 * MIB
        rows["segments"] = 50 + added

    change_table(folder, "allocator-rank0", grow)
    found = find_named(folder, "reserve_growth")
    told = found[-1]
    assert len({one.event for one in found}) == 1
    assert told.severity is Severity.WARNING
    assert told.headline.startswith(f"Reserved, unused GPU memory gr{'ows' if last is None else 'ew'} ")
    assert len(told.headline) <= 80
    assert told.step is not None
    assert 95 <= told.step <= 135
    assert told.fix == "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert ("full near step" in told.details) is (last is None)
    assert "larger" not in told.details


def make_look(step: int, **sizes: int) -> Look:
    """A look at a step in which each line has a few small blocks, and one of these MiB."""
    blocks = [
        LineBlocks(AllocatingLine("train.py", int(line[1:]), "main", ()), "forward", ((size * MIB, 1), (MIB, 5)))
        for line, size in sizes.items()
    ]
    whole = sum(one.total_bytes for one in blocks)
    return Look("peak", step, 0, 1, 1, whole, 0, tuple(blocks))


def test_the_lines_whose_blocks_have_become_larger() -> None:
    before = make_look(4, l7=300, l9=40)
    said = describe_larger(make_look(360, l7=310, l9=200, l12=150, l15=60), before)
    assert str(said) == (
        "In step 360, larger blocks than in step 4 are allocated at train.py:9 (0.20 GiB) and train.py:12 (0.15 GiB)."
    )
    assert describe_larger(make_look(360, l7=310, l9=44), before) is None
