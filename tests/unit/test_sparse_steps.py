"""Findings where most steps are only counted: fewer steps with phases are enough, if they span as many."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from zerotop.analysis.findings.support.evidence import Process
from zerotop.analysis.findings.support.memory.growing_readings import GrowthStretch, MemoryReadings
from zerotop.analysis.findings.support.steps.runs import find_settled_run, find_turns
from zerotop.recording.samples import Ints

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


def list_stretches(steps: Ints, held: Ints, chunk: int) -> list[tuple[int, int]]:
    readings = MemoryReadings(cast("Process", None))  # changes alone need none
    found: dict[int, int] = {}
    for begin in range(0, len(steps), chunk):
        part = slice(begin, begin + chunk)
        readings.add_changes(np.arange(len(steps))[part], steps[part], held[part])
        for base, ends in readings.list_long(begin):
            found.setdefault(base, ends[0])
    return list(found.items())


def list_steps(*, is_sparse: bool) -> Ints:
    return np.concatenate([np.arange(20), 20 + np.arange(30) * (11 if is_sparse else 1)])


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize(
    ("is_sparse", "varies", "last"), [(True, False, 23), (True, True, 24), (False, False, 29), (False, True, 29)]
)
def test_a_leak_is_found_in_sparse_steps(*, chunk: int, is_sparse: bool, varies: bool, last: int) -> None:
    """From step 20 on, in four or five readings far apart, or in ten steps that follow each other."""
    steps = list_steps(is_sparse=is_sparse)
    since = np.maximum(0, steps - 19)
    held = (1000 + (2 * since**2 if varies else 32 * since)) * MIB
    assert list_stretches(steps, held, chunk) == [(19, last)]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_leak_is_found_where_two_steps_in_a_row_are_read_now_and_then(*, chunk: int) -> None:
    """The last of the counted steps, and the one with phases after it: the leak began between the first two pairs."""
    steps = np.array([*range(20), 63, 64, 112, 113, 162, 163])
    held = 1000 * MIB + 32 * MIB * np.maximum(0, steps - 80)
    assert list_stretches(steps, held, chunk) == [(21, 25)]


def test_a_few_steps_in_a_row_that_keep_as_much_each_are_no_leak_yet() -> None:
    """After a gap of counted steps, as where steps become longer: four are too few, however alike."""
    steps = np.array([*range(20), 87, 88, 89, 90])
    held = 1000 * MIB + 32 * MIB * np.maximum(0, steps - 85)
    assert list_stretches(steps, held, 1000) == []
    more, kept = np.append(steps, 123), np.append(held, 1000 * MIB + 32 * MIB * 38)
    assert list_stretches(more, kept, 1000) == [(19, 24)]


def test_memory_that_follows_the_batch_is_no_leak() -> None:
    """What a step leaves behind follows the length of its batch."""
    random = np.random.default_rng(1)
    steps = np.concatenate([np.arange(20), 20 + np.arange(20_000) * 11])
    assert list_stretches(steps, 1000 * MIB + random.integers(0, 500, len(steps)) * MIB, 1000) == []


def make_stretch(steps: Ints, held: Ints, tokens: Ints | None = None) -> GrowthStretch:
    """Return readings of no process."""
    rows = np.zeros(len(steps) - 1, [("step", np.int64), ("tokens", np.int64), ("rows", np.int64)])
    rows["step"], rows["tokens"] = steps[1:], 1000 if tokens is None else tokens[1:]
    return GrowthStretch(None, 0, int(steps[0]), rows, held)  # type: ignore[arg-type]


@pytest.mark.parametrize("every", [1, 2, 10])
def test_a_leak_in_every_tenth_step_keeps_its_pace(every: int) -> None:
    steps = np.arange(40 * every)
    stretch = make_stretch(steps, (1000 + 32 * (steps // every)) * MIB)
    assert stretch.keeps_pace
    assert stretch.slope == 32 * MIB / every
    assert stretch.longest_level == every


def test_memory_allocated_once_for_each_shape_does_not_keep_its_pace() -> None:
    """The longest of the batches so far."""
    random = np.random.default_rng(3)
    steps = np.arange(2000)
    longest = np.maximum.accumulate(random.integers(100, 5000, len(steps)))
    assert not make_stretch(steps, longest * MIB).keeps_pace


@pytest.mark.parametrize(
    ("leaked", "curriculum", "is_known", "by_batches"),
    [(8, 0, True, False), (0, 0, True, True), (0, 10, True, True), (8, 10, True, True), (8, 0, False, True)],
)
def test_a_leak_is_distinguished_from_batches_of_many_sizes(
    *, leaked: int, curriculum: int, is_known: bool, by_batches: bool
) -> None:
    """The last batch's logits are alive after each step. Where the sizes are unknown, or rise by themselves: silence."""
    random, steps = np.random.default_rng(5), np.arange(96)
    tokens = random.integers(100, 500, len(steps)) + curriculum * steps
    stretch = make_stretch(steps, (1000 + tokens + leaked * steps) * MIB, tokens if is_known else -tokens)
    assert stretch.is_by_batches is by_batches
    if leaked and not curriculum:
        assert stretch.slope == pytest.approx(leaked * MIB, rel=0.25)
        assert stretch.keeps_pace
