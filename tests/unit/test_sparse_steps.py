"""Findings where most steps are only counted: fewer steps with phases are enough, if they span as many."""

from __future__ import annotations

import numpy as np
import pytest

from zerotop.analysis.annotations.memory.memory_creep import _find_stretches, _State
from zerotop.analysis.annotations.support.runs import find_settled_run, find_turns
from zerotop.session.samples import Ints

MIB = 1 << 20


@pytest.mark.parametrize(
    ("steps", "flags", "expected"),
    [
        (range(8), "..#####.", slice(2, 7)),
        (range(8), "..####..", None),
        ([0, 1, 12, 23, 34], "..###", slice(2, 5)),
        ([0, 1, 12, 23, 34], ".#.##", None),
        ([0, 1, 2, 3, 14], "..###", slice(2, 5)),
        ([0, 1, 2, 3, 4], "..###", None),
        ([0, 1], "##", None),
    ],
)
def test_a_settled_run(steps: list[int], flags: str, expected: slice | None) -> None:
    assert find_settled_run(np.array([flag == "#" for flag in flags]), np.array(steps), 3) == expected


TURNS_OF_3 = [0.0, 0.0, 0.3]


@pytest.mark.parametrize(
    ("lost_s", "apart", "expected"),
    [
        ([0.0] * 8 + TURNS_OF_3 * 8, 1, slice(8, 23)),
        ([0.0] * 8 + [0.05, 0.0, 0.25] * 8, 1, slice(8, 23)),
        (TURNS_OF_3 * 4 + [0.0] * 8, 1, None),
        (TURNS_OF_3 * 8, 11, None),
        ([0.0] * 8 + [0.0, 0.0, 0.05] * 8, 1, None),
        ([0.0] * 14 + [10.0] + [0.0] * 14, 1, None),
        ([], 1, None),
    ],
    ids=["workers in step", "nearly in step", "too few", "steps left out", "little", "one long wait", "no step"],
)
def test_time_lost_in_turns(lost_s: list[float], apart: int, expected: slice | None) -> None:
    """Iterations that take 0.1 s without what they lose."""
    lost = np.array(lost_s)
    assert find_turns(np.arange(len(lost)) * apart, lost, 0.1 + lost, 0.3) == expected


def find_stretches(steps: Ints, held: Ints, chunk: int) -> list[tuple[int, int]]:
    state = _State()
    found: list[tuple[int, int]] = []
    for begin in range(0, len(steps), chunk):
        part = slice(begin, begin + chunk)
        found += _find_stretches(steps[part], held[part], state)
        state.steps_read += len(steps[part])
    return found


def list_steps(*, is_sparse: bool) -> Ints:
    return np.concatenate([np.arange(20), 20 + np.arange(30) * (11 if is_sparse else 1)])


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize(("is_sparse", "last"), [(True, 24), (False, 31)])
def test_a_leak_is_found_in_sparse_steps(*, chunk: int, is_sparse: bool, last: int) -> None:
    """Of 32 MiB in each step from step 20 on: in five steps with phases far apart, or in twelve that follow each other."""
    steps = list_steps(is_sparse=is_sparse)
    held = 1000 * MIB + 32 * MIB * np.maximum(0, steps - 19)
    assert find_stretches(steps, held, chunk) == [(19, last)]


def test_what_varies_is_no_leak() -> None:
    """What a step leaves behind follows the length of its batch."""
    random = np.random.default_rng(1)
    steps = np.concatenate([np.arange(20), 20 + np.arange(20_000) * 11])
    assert find_stretches(steps, 1000 * MIB + random.integers(0, 500, len(steps)) * MIB, 1000) == []
