"""Memory that rises by the same bytes again and again, with level parts of any length between."""

from __future__ import annotations

import numpy as np
import pytest

from zerotop.analysis.findings.support.memory.floor_rises import LevelRises

MIB = 1 << 20


def list_levels(rises: list[int], readings: int = 7, noise: int = 3) -> np.ndarray:
    levels = np.cumsum([500, *rises])
    held = np.repeat(levels, readings)
    return (held + np.arange(len(held)) % 2 * noise) * MIB


@pytest.mark.parametrize(
    ("rises", "is_found"),
    [
        ([1321] * 5, True),
        ([1321, 1321, 2642, 1321, 1322], True),  # two at once, where readings are rare
        ([1321] * 4, False),
        ([100, 200, 150, 170, 90], False),  # caches for new shapes
        ([40] * 20, False),  # smaller ones are another detector's
        ([900, 100, 100, 100, 100, 100], True),  # a first step, then the leak
    ],
)
def test_five_alike_rises_are_a_series(rises: list[int], is_found: bool) -> None:
    assert (LevelRises().read_new(list_levels(rises)) is not None) == is_found


def test_a_series_ends_where_memory_falls_and_grows_while_it_is_read() -> None:
    held = list_levels([200] * 5)
    assert LevelRises().read_new(np.concatenate([held[:-7], held[:7], held[-7:]])) is None
    assert LevelRises().read_new(np.concatenate([held, held[:7]])) == (6, len(held) - 6)
    finder, found = LevelRises(), []
    for end in range(1, len(held) + 1):
        found += [finder.read_new(held[:end])]
    first, end = next(one for one in found if one is not None)
    assert first == 6  # the last reading before the first rise
    assert end == len(held) - 6
