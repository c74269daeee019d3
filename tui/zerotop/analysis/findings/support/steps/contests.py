"""Ranks with equal work of which one is slower than all others, in several rounds in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.findings.support.steps.runs import find_first_run


def find_slow_rounds(slow: Sequence[int] | NDArray[np.int64], rounds: int) -> slice | None:
    """Return the first rounds in a row in which the same rank was slow; None if there are not so many.

    ``slow``: the index of the slow rank in each round, -1 for none.
    """
    indices = np.asarray(slow, np.int64)
    firsts = [find_first_run(indices == one, rounds) for one in np.unique(indices[indices >= 0])]
    return min((slice(one, one + rounds) for one in firsts if one is not None), key=lambda run: run.start, default=None)


def are_equal(values: NDArray[Any], share: float) -> NDArray[np.bool_]:
    """Return whether the values of the ranks, shape (ranks, ...), differ at most by a share of the largest."""
    largest = values.max(axis=0)
    return np.asarray(largest - values.min(axis=0) <= share * largest, np.bool_)
