"""Runs of set flags, and of steps that lose time in turns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.stats.change_points import SETTLED_STEPS
from zerotop.recording.samples import Floats, Ints

# The most loader workers that are late together: these steps do not show the turns of more.
MOST_TURNS = 16


def find_first_run(flags: NDArray[np.bool_], length: int, allowed: NDArray[np.bool_] | None = None) -> int | None:
    """Return the index of the first ``length`` set flags in a row. ``allowed``: where runs may begin."""
    if len(flags) < length:
        return None
    runs = np.lib.stride_tricks.sliding_window_view(flags, length).all(axis=1)
    if allowed is not None:
        runs = runs & allowed
    return int(np.argmax(runs)) if runs.any() else None


def find_settled_run(flags: NDArray[np.bool_], steps: Ints, fewest: int) -> slice | None:
    """Return the first run of set flags that is as long as SETTLED_STEPS.

    If steps between these were left out, by their numbers, ``fewest`` flags are enough if they span as many steps.
    """
    runs = [
        slice(first, first + length)
        for length in range(fewest, SETTLED_STEPS + 1)
        if len(flags) >= length
        and (first := find_first_run(flags, length, _span_steps(steps, length) >= SETTLED_STEPS)) is not None
    ]
    return min(runs, key=lambda run: run.stop, default=None)


def _span_steps(steps: Ints, length: int) -> Ints:
    """Return the number of steps from each row to the one ``length`` rows on, both included."""
    spans: Ints = steps[length - 1 :] - steps[: len(steps) - length + 1] + 1
    return spans


def find_turns(steps: Ints, lost_s: Floats, iteration_s: Floats, share: float) -> slice | None:
    """Return the first steps that lose a share of their time if only every n-th loses any, for n up to MOST_TURNS.

    Each n steps in a row lose that share, for SETTLED_STEPS turns. The arrays have one value for each step. If steps between
    these were left out, no turns are found.
    """
    if np.count_nonzero(lost_s) < SETTLED_STEPS:
        return None
    sums = np.concatenate([np.zeros((2, 1)), np.cumsum([lost_s, iteration_s], axis=1)], axis=1)
    runs = []
    for count in range(2, MOST_TURNS + 1):
        length = SETTLED_STEPS * count
        if len(steps) < length:
            break
        lost, lasted = sums[:, count:] - sums[:, :-count]
        is_in_row = _span_steps(steps, length) == length
        first = find_first_run(lost >= share * lasted, length - count + 1, is_in_row)
        if first is not None:
            runs.append(slice(first, first + length))
    return min(runs, key=lambda run: run.stop, default=None)


def find_run_begins(flags: NDArray[np.bool_]) -> Ints:
    """Return the index at which the run of each set flag begins; 0 may also mean that it began earlier."""
    begins: Ints = np.maximum.accumulate(np.where(flags, 0, np.arange(1, len(flags) + 1)))
    return begins
