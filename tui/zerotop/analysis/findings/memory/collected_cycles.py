"""Allocated device memory grows until Python's garbage collector runs: reference cycles keep tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, in_each_attempt
from zerotop.analysis.findings.support.evidence import Ints
from zerotop.analysis.findings.support.memory.growing_readings import MemoryReadings
from zerotop.analysis.findings.support.thresholds import CREEP_BYTES
from zerotop.analysis.stats.change_points import SETTLED_STEPS
from zerotop_probe.recording.events import Garbage

_CYCLES = FindingKind(
    name="memory_creep",
    confidence=0.9,
    gpu_bytes="freed_bytes",
    headline="GPU memory grows {bytes_per_step:bytes} a step until Python's garbage is collected",
    details=(
        "Rank {rank}'s allocated memory fell {falls} times, about every {distance} steps, and each time Python's collector"
        " ran: by {freed_bytes:bytes}, which objects that refer to each other had kept."
    ),
    advice="Break the cycle: look for an object that keeps itself, as by a closure. Or collect every {every} steps.",
    fix="import gc; gc.collect()",
)
# Rises before a fall, in at least so many steps, of which the largest is at most this part; and the part of the rise that
# the fall gives back.
_LEAST_RISES, _LEAST_STEPS, _LARGEST_RISE, _FREED_SHARE = 4, 8, 0.5, 0.5
# All falls are in steps with collections by chance at most this often.
_CHANCE = 0.02
_MORE_OFTEN = 4  # than Python collects


class _Fall(NamedTuple):
    """A fall of memory between two readings, after a rise. ``place``: the index of the second one."""

    place: int
    step: int
    freed: int
    slope: float  # of the rise before it, bytes a step
    steps: int  # of that rise


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report each rank's memory once, with the first collection after which chance is no explanation."""
    for process in window.subject.processes:
        yield window.find_once(partial(_find_freed, process, window.items(process.events_of(Garbage), process)), process)


def _find_freed(process: Process, fresh: Sequence[Garbage]) -> Finding | None:
    if not fresh:
        return None
    readings = MemoryReadings.read(process)
    steps, ends_ns, held = (one[SETTLED_STEPS:] for one in readings.select_times(0))
    falls = list(_find_falls(steps, held))
    pauses = readings.select(SETTLED_STEPS)[0]
    is_pause = (pauses["eval_s"] > 0) | (pauses["checkpoint_s"] > 0)
    falls = [one for one in falls if not is_pause[one.place]]
    for event in fresh if falls else ():
        known = [one for one in falls if ends_ns[one.place] <= event.unix_ns]
        if len(known) > 1:
            collected = _find_collected(process, ends_ns, event.unix_ns)
            begin, end = known[0].place - known[0].steps, known[-1].place
            share = float(np.mean(collected[max(0, begin) : end + 1]))
            if all(collected[one.place] for one in known) and share ** len(known) <= _CHANCE:
                return _build_finding(readings, process, known, event.unix_ns)
    return None


def _find_falls(steps: Ints, held: Ints) -> Iterator[_Fall]:
    first = 0
    for index in (np.flatnonzero(np.diff(held) <= -CREEP_BYTES) + 1).tolist():
        rise, length = held[first:index], int(steps[index - 1] - steps[first])
        rises, freed = np.diff(rise), int(held[index - 1] - held[index])
        first = index
        if len(rises) < _LEAST_RISES or length < _LEAST_STEPS:
            continue
        grown = int(rise[-1] - rise[0])
        is_even = np.count_nonzero(rises > 0) >= _LEAST_RISES and rises.max() <= _LARGEST_RISE * grown
        if is_even and freed >= _FREED_SHARE * grown:
            yield _Fall(index, int(steps[index]), freed, grown / length, length)


def _find_collected(process: Process, ends_ns: Ints, until_ns: int) -> NDArray[np.bool_]:
    """Return whether the collector ran between each reading and the one before, as far as is known at a time."""
    collected, offset_ns = np.zeros(len(ends_ns), np.bool_), process.source.offset_ns
    for event in process.events_of(Garbage):
        if event.unix_ns <= until_ns:
            low, high = np.searchsorted(ends_ns, (event.begin_ns + offset_ns, event.unix_ns))
            # It is written once the step is over, or in the next one.
            collected[low : max(low + 1, high)] = True
    return collected


def _build_finding(readings: MemoryReadings, process: Process, falls: list[_Fall], known_ns: int) -> Finding:
    first, last = falls[0], falls[-1]
    begin, end = SETTLED_STEPS + max(0, first.place - first.steps), SETTLED_STEPS + last.place + 1
    rows = readings.select(begin, end)[0]
    distance = round(float(np.median(np.diff([one.step for one in falls]))))
    evidence = {
        "bytes_per_step": float(np.median([one.slope for one in falls])),
        "freed_bytes": int(np.median([one.freed for one in falls])),
        "steps_per_collection": distance,
    }
    values = {"falls": len(falls), "distance": distance, "every": max(1, distance // _MORE_OFTEN)}
    return _CYCLES.at_steps(process, rows, evidence, known_ns=known_ns, **values)
