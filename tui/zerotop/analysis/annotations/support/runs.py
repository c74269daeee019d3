"""Runs of set flags."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.stats.change_points import SETTLED_STEPS
from zerotop.session.samples import Ints


def find_first_run(flags: NDArray[np.bool_], length: int, allowed: NDArray[np.bool_] | None = None) -> int | None:
    """Return the index of the first ``length`` set flags in a row, of those where runs may begin."""
    if len(flags) < length:
        return None
    runs = np.lib.stride_tricks.sliding_window_view(flags, length).all(axis=1)
    if allowed is not None:
        runs = runs & allowed
    return int(np.argmax(runs)) if runs.any() else None


def find_settled_run(flags: NDArray[np.bool_], steps: Ints, fewest: int) -> slice | None:
    """Return where the first set flags in a row are that are as good as SETTLED_STEPS.

    Where steps between these (by their numbers) were left out, so many as ``fewest`` are, if they span as long.
    """
    runs = [
        slice(first, first + length)
        for length in range(fewest, SETTLED_STEPS + 1)
        if len(flags) >= length
        and (first := find_first_run(flags, length, _span_steps(steps, length) >= SETTLED_STEPS)) is not None
    ]
    return min(runs, key=lambda run: run.stop, default=None)


def _span_steps(steps: Ints, length: int) -> Ints:
    """Return how many steps there are from each one to the one ``length`` rows on, both included."""
    spans: Ints = steps[length - 1 :] - steps[: len(steps) - length + 1] + 1
    return spans


def find_run_begins(flags: NDArray[np.bool_]) -> Ints:
    """Return the index at which the run of each set flag begins; 0 also means that it may have begun before."""
    begins: Ints = np.maximum.accumulate(np.where(flags, 0, np.arange(1, len(flags) + 1)))
    return begins
