"""What a part of an iteration takes, where only some of the steps have phases and the others were counted.

Steps with phases are few in short steps, and may be longer or shorter than the others by chance. How long each iteration
took is known for all: a counted step is taken to be divided as the step with phases that took the most similar time, as on
the Ranks screen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from zerotop.recording.samples import Floats, Rows

ALIKE_TIMES = 2.0
"""The most by which the duration of a step and of the one from which its phases are estimated differ, as a factor."""
# From this part of the steps on, those that took another time, such as pauses, are left out.
_MOST_ALIKE = 0.75


class Part(NamedTuple):
    """Seconds of a part, and of the iteration that it is a part of."""

    seconds: float
    iteration_s: float

    @property
    def share(self) -> float:
        """The part of the iteration."""
        return self.seconds / self.iteration_s


def measure_part(seconds: Floats, iterations: Floats, every: Floats, average: Callable[[Floats], Any] = np.median) -> Part:
    """Return the usual seconds of a part and of the iteration.

    Args:
        seconds: of the part, in each step with phases.
        iterations: the iterations of these steps, in seconds.
        every: those of all steps from the first to the last of them, counted ones included; NaN where unknown.
        average: the median, or the mean where only some of the steps have the part.

    A few steps that took a time unlike any with phases count in neither.
    """
    if np.count_nonzero(~np.isnan(every)) > len(iterations):
        order = np.argsort(iterations, kind="stable")
        known = iterations[order]
        bounds = np.sqrt(known[1:] * known[:-1])  # in the middle by their ratio
        like = order[np.searchsorted(bounds, every)]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = every / iterations[like]
        is_counted = (ratio <= ALIKE_TIMES) & (ratio >= 1 / ALIKE_TIMES)  # false for NaN
        if is_counted.sum() < _MOST_ALIKE * np.isfinite(ratio).sum():
            is_counted = np.isfinite(ratio)
        if is_counted.any():
            seconds, iterations = (seconds[like] * ratio)[is_counted], every[is_counted]
    return Part(float(average(seconds)), float(average(iterations)))


def measure_in_steps(steps: Rows, phased: Rows, seconds: Floats, average: Callable[[Floats], Any] = np.median) -> Part:
    """Return :func:`measure_part` from the first to the last of some steps with phases, for all ``steps`` between them."""
    begin, end = np.searchsorted(steps["step"], (phased["step"][0], phased["step"][-1] + 1))
    return measure_part(seconds, phased["iteration_s"], steps["iteration_s"][begin:end], average)
