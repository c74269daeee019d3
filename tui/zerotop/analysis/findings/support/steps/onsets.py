"""Find the counted step with which a change began, if only a later step with phases shows it."""

from __future__ import annotations

import numpy as np

from zerotop.recording.samples import Ints, Rows

# Iterations before and after the change from which the two levels are taken. A change by less than this share shows nothing.
_LEVEL_STEPS = 10
_LEAST_SHARE = 0.1


def find_onset(steps: Rows, before_step: int, first_step: int) -> int:
    """Return the index of the step with which a change began, from the duration of iterations.

    ``steps``: all known steps of a rank, in order. ``before_step``: the last step known to be unchanged. ``first_step``: the
    first step known to be changed, which is returned if durations do not show the begin.
    """
    begin, end = np.searchsorted(steps["step"], [before_step + 1, first_step]).tolist()
    seconds = steps["iteration_s"]
    before, after = seconds[max(0, begin - _LEVEL_STEPS) : begin], seconds[end : end + _LEVEL_STEPS]
    if end <= begin or not len(before) or not len(after):
        return int(end)
    low, high = float(np.median(before)), float(np.median(after))
    if not abs(high - low) >= _LEAST_SHARE * low:
        return int(end)
    # Limited, so that a single very long iteration counts against both levels alike.
    distances = [np.minimum(np.abs(seconds[begin:end] - level), abs(high - low)) for level in (low, high)]
    misfits = np.concatenate([[0.0], np.cumsum(distances[0])]) + np.concatenate([np.cumsum(distances[1][::-1])[::-1], [0.0]])
    return int(begin + np.argmin(misfits))


def select_from_onset(steps: Rows, before_step: int, changed: Rows) -> Rows:
    """Return the steps from the one with which a change began to the last of those that are known to be ``changed``."""
    onset = find_onset(steps, before_step, int(changed["step"][0]))
    return steps[onset : np.searchsorted(steps["step"], changed["step"][-1]) + 1]


def find_growth_onset(steps: Ints, held: Ints, slope: float) -> int:
    """Return the step with which a value began to grow by ``slope`` a step.

    ``steps``, ``held``: the last reading before the growth, and the readings during it, shape (n + 1,) each.
    """
    if slope <= 0:
        return int(steps[1])
    # Values that hardly differ from the first one were read before the growth.
    first = int(np.argmax(held[1:] - held[0] >= slope / 2)) + 1
    grown = int(np.ceil((int(held[first]) - int(held[0])) / slope))
    return int(steps[first]) + 1 - min(max(grown, 1), int(steps[first] - steps[first - 1]))
