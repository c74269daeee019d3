"""Decide how much of the next step to record, so that watching takes no more than a share of the training time.

A step in full detail has readings of the device at the edges of its phases. One in light detail has the same phases and a
single reading, at its end. Steps that are long enough for full detail always get it; shorter ones get it as often as the
budget allows. If even light detail costs more than the budget, most steps are only counted: they have an end and no phases.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from zerotop_probe.recording.directory import BUDGET_VARIABLE, DEFAULT_BUDGET

# The first steps differ from all others: of so many, the first few are always recorded in full, and the others while all of
# them have cost no more than the budget of this time (ns). Later steps pay that back.
_FEWEST_FIRST, _FIRST_STEPS, _FIRST_NS = 5, 20, 3_000_000_000
# Steps that are recorded in full after an evaluation or a checkpoint, if the budget allows.
_STEPS_AFTER_PAUSE = 2
# A step is unlike those before if it is longer, or shorter, by this factor.
_UNLIKE_FACTOR = 1.5
# Weight of the last step in the usual duration and the usual costs.
_WEIGHT = 0.125
# A cost that is this many times the usual one was an interruption of the process.
_MOST_TIMES = 4.0
# Savings count up to the budget of this time, and debts up to that of a longer one (ns).
_SAVED_NS, _OWED_NS = 1_000_000_000, 5_000_000_000
# Even if light detail alone exceeds the budget, one step in each interval is recorded in full. The interval (ns) is between
# these limits, and long enough for full steps to take no more than this part of the budget.
_LONGEST_LIGHT_NS, _LONGEST_WITHOUT_FULL_NS, _FULL_PART = 2_000_000_000, 30_000_000_000, 0.1
# Every n-th counted step has phases, with one of these n. From 16 on, n does not grow if the next interval would be longer
# than this time (ns), even if the budget is exceeded.
_INTERVALS = (2, 4, 8, 16, 32, 64, 128, 256)
_SHORTEST_LAST, _LONGEST_UNSEEN_NS = 16, 2_000_000_000
# After overspending, intervals are longer for a while: as if the budget were smaller, down to this part of it.
_LEAST_PART = 0.25
# Every 64 steps the steps with phases move by 5: a job may do something in every 16th step.
_SHIFT, _SHIFT_EVERY = 5, 64
# Steps between two evaluations or checkpoints after which the next steps have phases.
_STEPS_BETWEEN_REQUESTS = 16
# If counted steps become longer, this many of the next ones have phases, to show why; at most once in this time (ns).
_STEPS_AFTER_LONGER, _LONGER_EVERY_NS = 3, 2_000_000_000
# The part of the budget that is left to the hooks, whatever the probe's threads have cost, and the part of their own shares
# that is left to the threads, whatever the probe has cost.
_HOOKS_PART, _LEAST_THREADS_PART = 0.5, 0.75

COUNTED, LIGHT, FULL = range(3)
"""The levels of detail."""


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
        self.detail = FULL
        """The detail of the step in progress."""
        self._steps = 0
        self._credit_ns = 0.0
        # Time that the hooks have saved of their share of the budget; negative if they have overspent it.
        self._hooks_credit_ns = 0.0
        self._owed_limit_ns = 0.0  # of either credit's debt
        self._first_ns = 0  # what the first steps have cost
        self._usual_ns = 0.0
        # The usual costs of a step by detail; 0 while unknown.
        self._costs_ns = [0.0, 0.0, 0.0]
        self._interval = _INTERVALS[0]
        # The number of next steps with full detail if the budget allows, and of those that must have phases.
        self._requested = self._mandatory = 0
        self._last_request = -_STEPS_BETWEEN_REQUESTS
        self._last_end_ns = self._last_cost_ns = self._last_full_ns = 0
        self._last_threads_ns = self._last_longer_ns = 0
        self._threads_share = 0.0  # the share of the training time that the probe's threads usually take

    @property
    def is_full(self) -> bool:
        """Whether the step in progress is recorded in full detail."""
        return self.detail == FULL

    @property
    def threads_part(self) -> float:
        """The part of their shares that the probe's threads may take now: less than 1 while the probe has overspent."""
        owed_ns = -min(0.0, self._credit_ns)
        return max(_LEAST_THREADS_PART, 1 - owed_ns / self._owed_limit_ns) if owed_ns else 1.0

    def request_full_detail(self) -> None:
        """Record the next steps in full if the budget allows: there was an evaluation or a checkpoint."""
        self._requested = _STEPS_AFTER_PAUSE
        if self._steps - self._last_request >= _STEPS_BETWEEN_REQUESTS:
            self._last_request, self._mandatory = self._steps, _STEPS_AFTER_PAUSE

    @property
    def like_ns(self) -> tuple[float, float]:
        """The shortest and the longest duration that count as similar to the steps so far."""
        return self._usual_ns / _UNLIKE_FACTOR, self._usual_ns * _UNLIKE_FACTOR

    def end_step(
        self,
        time_ns: int,
        cost_ns: int,
        *,
        threads_ns: int = 0,
        next_step: int | None = None,
        steps: int = 1,
        last_ns: int = 0,
    ) -> None:
        """Choose the detail of the next step.

        Args:
            time_ns: the end of a step.
            cost_ns: the cost of the hooks so far, without one-time costs.
            threads_ns: the cost of the probe's threads, which does not depend on a step's detail.
            next_step: number of the next step; None if it must have phases.
            steps: steps since the last call, if they were counted.
            last_ns: the duration of the last of several steps.
        """
        steps = max(1, steps)  # a step may end twice if a signal handler of the job interrupted its first end
        elapsed_ns = time_ns - self._last_end_ns
        by_hooks_ns, by_threads_ns = cost_ns - self._last_cost_ns, threads_ns - self._last_threads_ns
        self._last_end_ns, self._last_cost_ns, self._last_threads_ns = time_ns, cost_ns, threads_ns
        self._steps += steps
        if self._steps == 1:  # it began before the first measurement
            self._usual_ns, self._last_full_ns = 0.0, time_ns
            return
        shortest_ns, longest_ns = self.like_ns
        last_ns = last_ns or elapsed_ns
        is_unlike = not shortest_ns <= last_ns <= longest_ns
        self._learn(elapsed_ns, by_hooks_ns, by_threads_ns, steps)
        if self.detail == FULL:
            self._last_full_ns = time_ns
        if self.detail != COUNTED:
            self._requested -= self._requested > 0 and self.detail == FULL
            self._mandatory -= self._mandatory > 0
        if is_unlike and self._steps > _FIRST_STEPS:
            self._requested = max(self._requested, 1)
            is_seen = self.detail != COUNTED or time_ns - self._last_longer_ns < _LONGER_EVERY_NS
            if last_ns > longest_ns and not is_seen:
                self._last_longer_ns, self._mandatory = time_ns, _STEPS_AFTER_LONGER
        self.detail = self._choose_detail(time_ns, next_step)

    def _learn(self, elapsed_ns: int, hooks_ns: int, threads_ns: int, steps: int) -> None:
        duration_ns = elapsed_ns / steps
        # The usual duration falls quickly: the first steps may have taken a hundred times as long.
        weight = 0.5 if duration_ns < self._usual_ns else _WEIGHT
        self._usual_ns += (duration_ns - self._usual_ns) * weight if self._usual_ns else duration_ns
        self._threads_share += (threads_ns / max(1, elapsed_ns) - self._threads_share) * _WEIGHT
        # What was moved to the one-time costs may be added later than it was taken away.
        step_ns, usual_ns = max(0, hooks_ns) / steps, self._costs_ns[self.detail]
        probable_ns = min(step_ns, _MOST_TIMES * usual_ns) if usual_ns else step_ns
        self._costs_ns[self.detail] += (probable_ns - usual_ns) * _WEIGHT if usual_ns else probable_ns
        if self._steps <= _FIRST_STEPS:
            self._first_ns += round(steps * probable_ns)
        limit_ns = self.share * max(_SAVED_NS, 2 * duration_ns)
        self._owed_limit_ns = self.share * max(_OWED_NS, 2 * duration_ns)
        saved_ns = self.share * elapsed_ns - steps * probable_ns - threads_ns
        self._credit_ns = min(limit_ns, max(-self._owed_limit_ns, self._credit_ns + saved_ns))
        saved_ns = self._hooks_share * elapsed_ns - steps * probable_ns
        self._hooks_credit_ns = min(limit_ns, max(-self._owed_limit_ns, self._hooks_credit_ns + saved_ns))

    @property
    def _hooks_share(self) -> float:
        """The share of the training time that the hooks may take."""
        return max(_HOOKS_PART * self.share, self.share - self._threads_share)

    def _choose_detail(self, time_ns: int, next_step: int | None) -> int:
        _, light_ns, full_ns = self._costs_ns
        allowed_ns = self._hooks_share * self._usual_ns
        is_granted = self._steps < _FEWEST_FIRST or self._first_ns <= self.share * _FIRST_NS
        if (self._steps < _FIRST_STEPS and is_granted) or full_ns <= allowed_ns:
            return FULL
        if next_step is not None and light_ns > allowed_ns:
            self._choose_interval(allowed_ns)
            is_requested = self._mandatory > 0 or (self._requested > 0 and self._credit_ns >= 0)
            if not is_requested and self.find_uncounted(next_step) > next_step:
                return COUNTED
        if time_ns - self._last_full_ns > self._find_longest_light():
            return FULL
        return FULL if self._credit_ns >= (0.0 if self._requested else full_ns - light_ns) else LIGHT

    def _find_longest_light(self) -> float:
        """Return the longest time without a step in full detail."""
        part = _FULL_PART * self.share
        longest_ns = self._costs_ns[FULL] / part if part else _LONGEST_WITHOUT_FULL_NS
        return min(_LONGEST_WITHOUT_FULL_NS, max(_LONGEST_LIGHT_NS, longest_ns))

    def _choose_interval(self, allowed_ns: float) -> None:
        counted_ns, light_ns, _ = self._costs_ns
        more_ns = max(0.0, light_ns - counted_ns)
        if self._hooks_credit_ns < 0:
            allowed_ns *= max(_LEAST_PART, 1 + self._hooks_credit_ns / self._owed_limit_ns)
        for interval in _INTERVALS:
            is_last = interval >= _SHORTEST_LAST and 2 * interval * self._usual_ns > _LONGEST_UNSEEN_NS
            if is_last or interval == _INTERVALS[-1] or counted_ns + more_ns / interval <= allowed_ns:
                self._interval = interval
                return

    def find_uncounted(self, step: int) -> int:
        """Return the number of the first step from ``step`` on that has phases.

        All ranks choose the same steps, so that they can be compared; with different intervals, the longer one's steps.
        """
        while (step + step // _SHIFT_EVERY * _SHIFT) % self._interval:
            step += 1
        return step
