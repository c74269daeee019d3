"""Decide when a look at a step begins by itself: memory creeps, or steps or evaluations have a new peak.

A look begins when memory has grown again and again and never fallen, and when steps need clearly more memory than those of
earlier looks; for the first time after the first steps. An evaluation gets a look if the one before it had a new peak. The
cost of a look is estimated from the number of allocations, and must fit into the rest of the budget.
"""

from __future__ import annotations

from zerotop_probe.inside.device.allocator import StepMemory
from zerotop_probe.recording.event_values import CREEP, EVALUATION, PEAK

# Memory creeps if it has risen this many times without falling, and by this many bytes. Some loops keep something in every
# tenth step: a look takes as many steps as lie between two rises, at most these, and one more.
_CREEP_RISES, _MOST_LEVEL = 6, 12
# A look in which nothing stays is repeated with so many times the steps, so often: a script may keep something in each
# fiftieth step, of which the readings of counted steps see only that memory rises.
_LONGER, _MOST_REPEATED = 5, 2
# Where it falls, too, because batches differ: the least of this many readings rises each time.
_LOW_READINGS = 8
_CREEP_BYTES = 16 << 20
# A new peak is higher than those seen before by this share and these bytes, in each of this many steps.
_PEAK_SHARE = 0.05
_PEAK_BYTES = 64 << 20
_PEAK_STEPS = 2
# A peak is looked at again once this many times as much is reserved as at the last look, and this many bytes more.
_RESERVED_TIMES, _RESERVED_BYTES = 1.25, 1 << 30
# Steps that create the optimizer's state and buffers.
_FIRST_STEPS = 3
# Looks begin before steps that this divides: ranks wait for each other, so they should look in the same steps.
_LOCKSTEP = 4
# Time between two looks because memory creeps, and between the first two for a peak, which doubles each time (ns).
_CREEP_PAUSE_NS, _PEAK_PAUSE_NS = 600_000_000_000, 10_000_000_000

# A peak of this many times the known one is rare, so the next look comes this soon (ns).
_JUMP_TIMES, _JUMP_PAUSE_NS = 2, 1_000_000_000

# What a look costs by itself, and for each allocation until a look has shown it, and at least (ns).
_LOOK_NS, _ALLOCATION_NS, _LEAST_ALLOCATION_NS = 10_000_000, 25_000, 10_000
# The same for an evaluation, of which a look sees only the begin.
_MOST_ALLOCATIONS = 15_000
# The part of the budget that looks alone may use, and the time for which it is advanced (ns).
_BUDGET_PART = 0.25
_ADVANCE_NS = 30_000_000_000


class MemoryWatch:
    """The rule for looks of one rank. All times are nanoseconds."""

    def __init__(self, share: float) -> None:
        """``share``: the budget, as a share of the training time."""
        self._share = share
        self._steps = 0
        self._last_step = 0
        self._begin_ns = 0
        self._spent_ns = 0
        self._allocation_ns: float = _ALLOCATION_NS
        self._last = StepMemory(-1, -1, 0)
        self._step_allocations = 0
        self._rises = self._readings = 0  # without a fall
        self._base_bytes = 0  # held before them
        self._some_held: list[int] = []  # the last readings, less than _LOW_READINGS
        self._lows: list[int] = []  # the least of those before
        self._last_peaks: list[int] = []
        self._known_peaks = {PEAK: 0, EVALUATION: 0}  # of the steps and evaluations that were looked at
        self._known_reserved = 0
        self._evaluation_peak = 0  # of the last evaluation
        self._evaluation_allocations = 0
        self._looked_ns: dict[str, int] = {}
        self._missed = 0  # looks at a creep in which nothing stayed
        self._peak_pause_ns = _PEAK_PAUSE_NS // 2

    def judge_step(self, step: int, time_ns: int, memory: StepMemory, cost_ns: int) -> str:
        """Return the reason to look at the steps after ``step``, which has just ended; "" if there is none.

        Steps may be left out. ``cost_ns``: the cost of the whole probe so far.
        """
        self._begin_ns = self._begin_ns or time_ns
        self._learn(step, memory)
        why = self._find_reason(time_ns)
        if not why or (step + 1) % _LOCKSTEP:
            return ""
        return why if self._fits_budget(self._step_allocations * self._count_look_steps(why), time_ns, cost_ns) else ""

    def judge_evaluation(self, time_ns: int, memory: StepMemory, cost_ns: int) -> str:
        """Return why to look at the evaluation that begins; empty if there is no reason."""
        self._last = self._last._replace(allocations=memory.allocations)
        is_higher = _is_higher(self._evaluation_peak, max(self._known_peaks.values()))
        is_due = is_higher and self._fits_budget(self._evaluation_allocations, time_ns, cost_ns)
        return EVALUATION if is_due else ""

    def end_evaluation(self, memory: StepMemory) -> None:
        """Learn from an evaluation that has ended."""
        self._evaluation_peak = memory.peak
        self._evaluation_allocations = min(_MOST_ALLOCATIONS, max(0, memory.allocations - self._last.allocations))
        self._last = self._last._replace(allocations=memory.allocations)

    def _learn(self, step: int, memory: StepMemory) -> None:
        self._steps += 1
        if memory.held > self._last.held >= 0:
            if not self._rises:
                self._base_bytes, self._readings = self._last.held, 0
            self._rises += 1
        elif memory.held < self._last.held:
            self._rises = 0
        self._readings += 1
        self._some_held.append(memory.held)
        if len(self._some_held) == _LOW_READINGS:
            self._lows, self._some_held = [*self._lows, min(self._some_held)][-_CREEP_RISES - 1 :], []
        self._last_peaks = [*self._last_peaks, memory.peak][-_PEAK_STEPS:]
        steps, self._last_step = max(1, step - self._last_step), step
        self._step_allocations = max(0, memory.allocations - self._last.allocations) // steps
        self._last = memory

    def _find_reason(self, time_ns: int) -> str:
        is_growing = self._rises >= _CREEP_RISES and self._last.held - self._base_bytes >= _CREEP_BYTES
        if (is_growing or self._rises_below()) and self._is_over(CREEP, time_ns, _CREEP_PAUSE_NS):
            return CREEP
        is_higher = self._steps > _FIRST_STEPS and _is_higher(min(self._last_peaks), self._known_peaks[PEAK])
        if self._known_reserved:
            least = max(_RESERVED_TIMES * self._known_reserved, self._known_reserved + _RESERVED_BYTES)
            is_higher |= self._last.reserved >= least
        is_jump = min(self._last_peaks) >= _JUMP_TIMES * self._known_peaks[PEAK] > 0
        pause_ns = _JUMP_PAUSE_NS if is_jump else self._peak_pause_ns
        return PEAK if is_higher and self._is_over(PEAK, time_ns, pause_ns) else ""

    def _rises_below(self) -> bool:
        is_rising = len(self._lows) > _CREEP_RISES and all(low < high for low, high in zip(self._lows, self._lows[1:]))
        return is_rising and self._lows[-1] - self._lows[0] >= _CREEP_BYTES

    def _count_look_steps(self, why: str) -> int:
        """Return the steps of a look: whether a block stays shows in the step after the one that has allocated it."""
        if why == PEAK:
            return 1
        level = min(_MOST_LEVEL, self._readings // (self._rises - 1)) if self._rises >= _CREEP_RISES else 1
        longest = max(level, _MOST_ALLOCATIONS // max(1, self._step_allocations))
        return 1 + min(longest, level * int(_LONGER**self._missed))

    def _is_over(self, why: str, time_ns: int, pause_ns: int) -> bool:
        return why not in self._looked_ns or time_ns - self._looked_ns[why] >= pause_ns

    def _fits_budget(self, allocations: int, time_ns: int, cost_ns: int) -> bool:
        probable_ns = _LOOK_NS + self._allocation_ns * allocations
        granted_ns = self._share * (time_ns - self._begin_ns + _ADVANCE_NS)
        return probable_ns <= max(granted_ns - cost_ns, _BUDGET_PART * granted_ns - self._spent_ns)

    def begin_look(self, why: str, time_ns: int) -> int:
        """Note that a look begins, and return its number of steps; 0 for an evaluation."""
        self._looked_ns[why] = time_ns
        if why == CREEP:
            return self._count_look_steps(why)
        if why == EVALUATION:
            self._known_peaks[EVALUATION] = self._evaluation_peak
            return 0
        self._known_peaks[PEAK], self._known_reserved = min(self._last_peaks), self._last.reserved
        self._peak_pause_ns *= 2
        return self._count_look_steps(why)

    def end_look(self, entries: int, cost_ns: int, *, is_missed: bool = False) -> None:
        """Note the cost of a look and the number of entries that it found: allocations and frees.

        ``is_missed``: whether memory creeps, and nothing stayed in these steps.
        """
        if is_missed and self._missed < _MOST_REPEATED:
            self._missed += 1
            self._looked_ns.pop(CREEP, None)
        self._spent_ns += cost_ns
        if entries:
            self._allocation_ns = max(_LEAST_ALLOCATION_NS, (cost_ns - _LOOK_NS) / (entries / 2))


def _is_higher(peak: int, known: int) -> bool:
    return peak > known + max(_PEAK_BYTES, _PEAK_SHARE * known)
