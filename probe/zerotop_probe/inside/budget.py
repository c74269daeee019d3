"""Decide how much of the next step to record, so that watching takes no more than a share of the training time.

A step in full detail has readings of the device at the edges of its phases; one in light detail has the same phases and a
single reading, at its end. Steps that are long enough for full detail always get it; of shorter ones as many as the budget
allows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from zerotop_probe.recording.directory import BUDGET_VARIABLE, DEFAULT_BUDGET

# The first steps differ from all others, and are too few to cost much.
_FIRST_STEPS = 20
# Steps that are recorded in full after an evaluation or a checkpoint, if the budget allows.
_STEPS_AFTER_PAUSE = 2
# A step is unlike those before if it takes so many times as long, or as short.
_UNLIKE_FACTOR = 1.5
# Weight of the last step in the usual duration and the usual costs.
_WEIGHT = 0.125
# A cost that is so many times the usual one was an interruption of the process.
_MOST_TIMES = 4.0
# What was saved or overspent in this time counts, not what was before.
_MEMORY_NS = 1_000_000_000
# Even where light detail alone exceeds the budget, one step in this time is recorded in full.
_LONGEST_LIGHT_NS = 2_000_000_000


def read_budget(environment: Mapping[str, str] = os.environ) -> float:
    """Return the share of the training time that watching may take, from the environment, where it is a percentage."""
    try:
        return max(0.0, float(environment[BUDGET_VARIABLE])) / 100
    except (KeyError, ValueError):
        return DEFAULT_BUDGET


class DetailBudget:
    """The detail of one rank's steps; all times are nanoseconds."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.is_full = True
        """Whether the step in progress is recorded in full detail."""
        self._steps = 0
        self._credit_ns = 0.0
        self._usual_ns = 0.0
        # The usual costs of a step in light and in full detail; 0 while unknown.
        self._costs_ns = [0.0, 0.0]
        self._wished = 0
        self._last_end_ns = self._last_cost_ns = self._last_full_ns = 0

    def wish_detail(self) -> None:
        """Record the next steps in full if the budget allows: there was an evaluation or a checkpoint."""
        self._wished = _STEPS_AFTER_PAUSE

    def end_step(self, time_ns: int, cost_ns: int) -> None:
        """Choose the detail of the next step; ``cost_ns`` is the probe's cost so far, without one-time costs."""
        duration_ns, spent_ns = time_ns - self._last_end_ns, cost_ns - self._last_cost_ns
        self._last_end_ns, self._last_cost_ns = time_ns, cost_ns
        self._steps += 1
        if self._steps == 1:  # it began before the first measurement
            self._usual_ns, self._last_full_ns = 0.0, time_ns
            return
        is_unlike = not self._usual_ns / _UNLIKE_FACTOR <= duration_ns <= self._usual_ns * _UNLIKE_FACTOR
        self._learn(duration_ns, spent_ns)
        if self.is_full:
            self._last_full_ns = time_ns
            self._wished -= self._wished > 0
        if is_unlike and self._steps > _FIRST_STEPS:
            self._wished = max(self._wished, 1)
        self.is_full = self._choose_full(time_ns)

    def _learn(self, duration_ns: int, spent_ns: int) -> None:
        # The usual duration falls quickly: the first steps may have taken a hundred times as long.
        weight = 0.5 if duration_ns < self._usual_ns else _WEIGHT
        self._usual_ns += (duration_ns - self._usual_ns) * weight if self._usual_ns else duration_ns
        usual_ns = self._costs_ns[self.is_full]
        probable_ns = min(spent_ns, _MOST_TIMES * usual_ns) if usual_ns else spent_ns
        self._costs_ns[self.is_full] += (probable_ns - usual_ns) * _WEIGHT if usual_ns else probable_ns
        limit_ns = self.share * max(_MEMORY_NS, 2 * duration_ns)
        self._credit_ns = min(limit_ns, max(-limit_ns, self._credit_ns + self.share * duration_ns - spent_ns))

    def _choose_full(self, time_ns: int) -> bool:
        light_ns, full_ns = self._costs_ns
        if self._steps < _FIRST_STEPS or full_ns <= self.share * self._usual_ns:
            return True
        if self._steps == _FIRST_STEPS:
            self._credit_ns = 0.0  # the first steps were granted
        if time_ns - self._last_full_ns > _LONGEST_LIGHT_NS:
            return True
        return self._credit_ns >= (0.0 if self._wished else full_ns - light_ns)
