"""Steps from which on more stays allocated, where most steps are only counted: readings between phases are too few then.

What stays allocated differs less from step to step than a peak does, and each sample in a step is at least as high.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support.evidence import Ints, Process, Rows
from zerotop.analysis.findings.support.memory.growing_readings import MemoryReadings
from zerotop.analysis.findings.support.thresholds import JUMP_BYTES
from zerotop.analysis.stats.change_points import LEVEL_STEPS, SETTLED_STEPS

# For so many steps all samples are higher, and there are so many of them.
_LASTING_STEPS, _LEAST_SAMPLES = 12, 6
# By which part of the rise what stays may differ before it and after it, and the peak and the lowest samples after it.
_UNEVENNESS = 0.25


class KeptRise(NamedTuple):
    """Steps with phases before and after a rise, and when it is known (unix nanoseconds)."""

    before: Rows
    after: Rows
    between: tuple[int, int]  # the last step before it, and the first one after it
    held_bytes: tuple[int, int]  # that stay allocated after steps before it, and after it
    known_ns: int


class KeptRiseSearch:
    """The search in the readings of one process, each of which is examined once."""

    def __init__(self) -> None:
        self._next, self._first = SETTLED_STEPS, 0  # indices of readings: the next one, and the first one of the level

    def find_rises(self, process: Process) -> Iterator[KeptRise]:
        """Yield each rise that new samples show."""
        indices, held = MemoryReadings.read(process).indices, MemoryReadings.read(process).held
        while self._next < len(held):
            level = held[max(self._first, self._next - LEVEL_STEPS) : self._next]
            if held[self._next] < level.max() + JUMP_BYTES:
                self._next += 1
                continue
            known_ns = _find_known(process, int(indices[self._next]))
            if known_ns is None:
                return
            begin = self._next - len(level)
            since = int(process.steps["step"][indices[self._first]])
            rise = _check_rise(process, indices[begin:], held[begin:], len(level), known_ns, since)
            if rise is None:
                self._next += 1
            else:
                self._first, self._next = self._next, self._next + SETTLED_STEPS
                yield rise


def _find_known(process: Process, index: int) -> int | None:
    """Return when enough steps have ended, and samples were taken, since the step with this index; None before."""
    ends_ns = process.steps["end_unix_ns"]
    if index + _LASTING_STEPS >= len(ends_ns):
        return None
    samples = process.records("allocator").read_window(int(ends_ns[index]), int(ends_ns[-1]))
    if len(samples) < _LEAST_SAMPLES:
        return None
    return max(int(ends_ns[index + _LASTING_STEPS]), int(samples.times[_LEAST_SAMPLES - 1]))


def _check_rise(process: Process, indices: Ints, held: Ints, first: int, known_ns: int, since: int) -> KeptRise | None:
    """Return the rise at reading ``first`` of these; None if it is none. ``since``: the first step of the level before."""
    steps, ends_ns = process.steps, process.steps["end_unix_ns"]
    count = int(np.searchsorted(ends_ns[indices], known_ns, "right"))
    peaks, low, high = steps["allocated_peak_bytes"][indices[:count]], held[:first], held[first:count]
    risen, peak_risen = (int(np.median(values[first:]) - values[:first].max()) for values in (held[:count], peaks))
    if peaks.min() <= 0 or peaks[first:].min() < peaks[:first].max() + JUMP_BYTES or len(low) < SETTLED_STEPS:
        return None
    spreads = np.ptp(low) / max(1, risen), np.ptp(high) / max(1, risen), np.ptp(peaks[first:]) / peak_risen
    if risen < JUMP_BYTES or max(spreads) > _UNEVENNESS:
        return None
    allocated = process.records("allocator").read_window(int(ends_ns[indices[first]]), known_ns).rows["allocated_bytes"]
    lowest, later = int(allocated.min()), int(allocated[len(allocated) // 2 :].min())
    if lowest < high.min() - _UNEVENNESS * risen or later > high.max() + _UNEVENNESS * risen:
        return None
    phased = process.phased_steps_until(known_ns)
    begin, split = np.searchsorted(phased["step"], (since, int(steps["step"][indices[first]]))).tolist()
    if not begin < split < len(phased):
        return None
    levels = int(np.median(low)), int(np.median(high))
    between = _find_steps(process, int(indices[first - 1]), int(indices[first]), int(peaks[:first].max()))
    return KeptRise(phased[max(begin, split - LEVEL_STEPS) : split], phased[split:], between, levels, known_ns)


def _find_steps(process: Process, last: int, first: int, highest: int) -> tuple[int, int]:
    """Return the last step that peaks as before, and the first one that peaks higher, of the steps with these indices."""
    steps = process.steps
    begin_ns, end_ns = int(steps["end_unix_ns"][last]), int(steps["end_unix_ns"][first])
    if process.has_exact_peaks:
        samples = process.records("allocator").read_window(begin_ns, end_ns)
        is_high = samples.rows["allocated_peak_bytes"] > highest + JUMP_BYTES
        if len(samples) and is_high.any():
            index = int(np.argmax(is_high))
            running = np.searchsorted(steps["end_unix_ns"], samples.times)
            first = int(min(first, running[index]))
            last = int(max(last, running[index - 1] - 1)) if index else last
    return int(steps["step"][last]), int(steps["step"][first])
