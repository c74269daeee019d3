"""Leaks at each k-th step, where few steps are read or batches differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import recordings
from changed_recordings import Rows, change_table, find_named
from zerotop.analysis.findings import Severity
from zerotop.analysis.findings.support.memory.floor_rises import FloorSearch
from zerotop.recording.samples import Ints

MIB = 1 << 20


def list_steps(count: int, random: np.random.Generator) -> Ints:
    """Return the steps that are read where most are only counted: the first ones, and then pairs far apart."""
    pairs = 20 + np.cumsum(random.integers(5, 60, count))
    return np.array([*range(20), *np.stack([pairs, pairs + 1], axis=1).ravel()])


def leak(every: int, mib: int, *, varies: float = 0.0, random: np.random.Generator) -> Callable[[Ints], Ints]:
    """Return what a leak from step 100 on has left after steps, in MiB."""
    each = mib * (1 + varies * random.uniform(-1, 1, 4000))
    total = np.concatenate([[0], np.cumsum(each)])
    return lambda steps: total[np.maximum(0, (steps - 100) // every)].astype(np.int64)


@pytest.mark.parametrize("every", [3, 10, 40])
@pytest.mark.parametrize("noise", [0, 200])
@pytest.mark.parametrize("varies", [0.0, 0.5])
def test_a_leak_at_some_steps_raises_the_floor(every: int, noise: int, varies: float) -> None:
    random = np.random.default_rng(every + noise)
    steps = list_steps(60, random)
    left = leak(every, 100, varies=varies, random=random)(steps)
    held = (1000 + left + random.integers(0, noise + 1, len(steps))) * MIB
    found = FloorSearch().find_rise(steps, held)
    assert found is not None
    assert steps[found[0]] >= 40  # a pair or two before the first rise
    assert left[found[0]] <= 0.15 * left[found[1] - 1]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["varies", "largest so far", "once"])
def test_memory_without_a_leak_does_not_raise_the_floor(kind: str, seed: int) -> None:
    """Readings that follow their batches, a buffer for the largest of these, and memory that is allocated once."""
    random = np.random.default_rng(seed)
    steps = list_steps(600, random)
    more = {
        "varies": random.integers(0, 1000, len(steps)),
        "largest so far": np.maximum.accumulate(random.integers(100, 5000, len(steps))),
        "once": 3000 * (steps > 3000) + random.integers(0, 30, len(steps)),
    }
    assert FloorSearch().find_rise(steps, (1000 + more[kind]) * MIB) is None


@pytest.mark.parametrize(("share", "severity"), [(0.0, Severity.INFO), (0.05, Severity.INFO), (0.5, Severity.WARNING)])
def test_a_cache_that_is_full(tmp_path: Path, share: float, severity: Severity) -> None:
    """Each step of a job leaves 32 MiB from step 300 on: here up to step 350, and then a share of it."""
    folder = recordings.unpack_to_folder("gpu-lines-leak", tmp_path)
    allowed = np.r_[0:350, 350 + share * np.arange(100_000)]

    def fill(rows: Rows) -> None:
        less = ((rows["step"] - allowed[rows["step"]]) * 32 * MIB).astype(np.int64)
        for name in ("allocated_bytes", "allocated_peak_bytes"):
            rows[name][rows[name] >= 0] -= less[rows[name] >= 0]

    change_table(folder, "allocator-rank0", fill)
    (creep,) = find_named(folder, "memory_creep")
    assert creep.severity is severity
    assert (" to step " in creep.headline) == (severity is Severity.INFO)


@pytest.mark.parametrize(("mib", "severity", "cost"), [(5, Severity.INFO, 0.0), (20, Severity.WARNING, 1.0)])
def test_growth_by_little_costs_nothing_yet(tmp_path: Path, mib: int, severity: Severity, cost: float) -> None:
    folder = recordings.unpack_to_folder("gpu-leak", tmp_path)  # 79 GiB, and 32 MiB a step

    def leak_less(rows: Rows) -> None:
        for name in ("allocated_bytes", "allocated_peak_bytes"):
            rows[name][rows[name] >= 0] -= (32 - mib) * MIB * rows["step"][rows[name] >= 0]

    change_table(folder, "allocator-rank0", leak_less)
    (creep,) = find_named(folder, "memory_creep")
    assert (creep.severity, creep.cost) == (severity, cost)


@pytest.mark.parametrize(("mib", "expected"), [(270, [110]), (0, [])])
def test_graphs_that_each_tenth_step_keeps(tmp_path: Path, mib: int, expected: list[int]) -> None:
    """In a job of 13 ms steps, of which 36 are read: a leak of 8 GiB had no finding."""
    folder = recordings.unpack_to_folder("hand-clean0", tmp_path)
    left = leak(10, mib, varies=0.4, random=np.random.default_rng(1))

    def grow(rows: Rows) -> None:
        more = left(rows["step"]) * MIB
        for name in ("allocated_bytes", "allocated_peak_bytes", "reserved_bytes", "reserved_peak_bytes"):
            rows[name][rows[name] >= 0] += more[rows[name] >= 0]

    change_table(folder, "allocator-rank0", grow)
    found = find_named(folder, "memory_creep")
    assert [round(one.step or 0, -1) for one in found] == expected
