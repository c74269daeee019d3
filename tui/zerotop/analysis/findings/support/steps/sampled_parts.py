"""What a part of an iteration takes, where only some of the steps have phases and the others were counted.

Steps with phases are few in short steps, and may be longer or shorter than the others by chance. How long each iteration
took is known for all, and corrects for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from zerotop.recording.samples import Floats, Rows

# Steps with phases from which the part follows the iteration in its own way; in fewer it is in proportion.
_FEWEST_FITTED = 12


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

    The iteration is the average of all. The part is estimated from it by linear regression within the steps with phases
    (W. G. Cochran, Sampling Techniques, 3rd edition, chapter 7), where others were counted.
    """
    every = every[~np.isnan(every)]
    part, sampled = float(average(seconds)), float(average(iterations))
    if len(every) <= len(iterations):
        return Part(part, sampled)
    whole, slope = float(average(every)), part / sampled
    if len(iterations) >= _FEWEST_FITTED and (spread := float(np.var(iterations))) > 0:
        slope = float(np.mean((seconds - seconds.mean()) * (iterations - iterations.mean()))) / spread
    estimate = part + min(1.0, max(0.0, slope)) * (whole - sampled)
    return Part(min(max(estimate, 0.0), whole), whole)


def measure_in_steps(steps: Rows, phased: Rows, seconds: Floats, average: Callable[[Floats], Any] = np.median) -> Part:
    """Return :func:`measure_part` from the first to the last of some steps with phases, for all ``steps`` between them."""
    begin, end = np.searchsorted(steps["step"], (phased["step"][0], phased["step"][-1] + 1))
    return measure_part(seconds, phased["iteration_s"], steps["iteration_s"][begin:end], average)
