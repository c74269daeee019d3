"""Steps from which on the peak of the device memory is higher, and the ranks that share such a rise."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support.evidence import Group, Process, Rows
from zerotop.analysis.findings.support.lines.stack_lines import find_deadline
from zerotop.analysis.findings.support.memory.kept_rises import KeptRise, KeptRiseSearch
from zerotop.analysis.findings.support.thresholds import JUMP_BYTES
from zerotop.analysis.findings.support.window import SearchWindow
from zerotop.analysis.stats.change_points import LEVEL_STEPS, ShiftFinder

# How long to wait until each rank has a reading after a rise (ns).
_PATIENCE_NS = 10_000_000_000
# The part of the largest rise of a rank that another one needs to share it, and by how much a peak without a rise differs.
_SHARED_PART, _STEADY_SHARE = 0.5, 0.05


class PeakRise(NamedTuple):
    """Steps of a process before and after a rise of their peak."""

    process: Process
    before: Rows
    after: Rows
    kept: KeptRise | None = None  # that of which it is known

    @property
    def between(self) -> tuple[int, int]:
        """The last step before the rise, and the first one after it, of those with a reading."""
        if self.kept is not None:
            return self.kept.between
        begin, end = int(self.before["step"][-1]), int(self.after["step"][0])
        steps = self.process.steps
        # Counted steps have a reading now and then: all those up to a low one are low, and those since a high one are high.
        known = steps[slice(*np.searchsorted(steps["step"], (int(self.before["step"][0]), end + 1)))]
        known = known[known["allocated_peak_bytes"] > 0]
        medians = [float(np.median(rows["allocated_peak_bytes"])) for rows in (self.before, self.after)]
        is_high = known["allocated_peak_bytes"] > sum(medians) / 2
        low = np.flatnonzero(~is_high & (known["step"] < end))
        if not len(low) or low[-1] + 1 >= len(known):
            return begin, end
        return int(known["step"][low[-1]]), int(known["step"][low[-1] + 1])

    @property
    def held_bytes(self) -> tuple[int | None, int | None]:
        """What stays allocated after steps before the rise, and after it; None where that is not known."""
        return self.kept.held_bytes if self.kept is not None else (None, None)

    @property
    def grown_bytes(self) -> float:
        medians = [np.median(rows["allocated_peak_bytes"]) for rows in (self.before, self.after)]
        return float(medians[1] - medians[0])

    @property
    def is_steady(self) -> bool:
        """Whether there is no rise and no fall."""
        return abs(self.grown_bytes) <= _STEADY_SHARE * float(np.median(self.before["allocated_peak_bytes"]))

    @property
    def known_ns(self) -> int:
        return self.kept.known_ns if self.kept is not None else int(self.after["end_unix_ns"][-1])


class SharedRise(NamedTuple):
    """A rise, and the ranks that share it (ascending)."""

    rise: PeakRise
    ranks: tuple[int, ...]
    of_all: bool  # whether all ranks share it
    others_steady: bool  # whether there are others, and the peak of each is known to be that of before
    known_ns: int


def find_shared(window: SearchWindow[Group]) -> Iterator[SharedRise]:
    """Yield each lasting rise once, as soon as it is known which ranks share it."""
    processes = window.subject.processes
    finders = [(process, window.keep(ShiftFinder, process.rank)) for process in processes]  # each reads a step once
    rises = [rise for process, finder in finders for rise in _find_rises(process, finder)]
    for process in processes:
        kept = window.keep(KeptRiseSearch, process.rank).find_rises(process)
        rises += [
            PeakRise(process, one.before, one.after, one) for one in kept if not _grows_on(process, one.before, one.after)
        ]
    rises.sort(key=lambda rise: (rise.known_ns, rise.process.rank))
    known: list[tuple[int, int]] = window.keep(list, PeakRise)
    for _, shared in window.await_each(_drop_known(rises, known), partial(_find_ranks, processes), PeakRise):
        yield shared


def _drop_known(rises: list[PeakRise], known: list[tuple[int, int]]) -> Iterator[PeakRise]:
    """Yield the rises that are new: the phases of ranks are recorded in different steps. Adds them to the known ones."""
    for rise in rises:
        begin, end = rise.between
        if not any(begin < known_end and known_begin < end for known_begin, known_end in known):
            known.append((begin, end))
            yield rise


def _find_rises(process: Process, finder: ShiftFinder) -> Iterator[PeakRise]:
    steps = process.phased_steps  # of several counted steps only the highest peak is known
    peaks = steps["allocated_peak_bytes"]
    for shift in finder.find_shifts(peaks):
        before, after = steps[shift.before], steps[shift.first : shift.last + 1]
        if min(before["allocated_peak_bytes"].min(), after["allocated_peak_bytes"].min()) <= 0:
            continue
        is_first_real = bool(before["skipped"].mean() > 0.5 > after["skipped"].mean())
        is_jump = peaks[shift.first] - np.median(peaks[shift.before]) >= JUMP_BYTES and not is_first_real
        if is_jump and not _grows_on(process, before, after):
            yield PeakRise(process, before, after)


def _grows_on(process: Process, before: Rows, after: Rows) -> bool:
    """Whether memory grows steadily, so that a few counted steps between two readings only look like a jump.

    What it grows by afterwards is compared with the jump since the last low reading: those of counted steps tell, too.
    """
    (begin, first), end = (int(rows["step"][index]) for rows, index in ((before, -1), (after, 0))), int(after["step"][-1])
    known = process.steps[slice(*np.searchsorted(process.steps["step"], (begin, end + 1)))]
    known = known[known["allocated_peak_bytes"] > 0]
    steps, highest = known["step"], np.maximum.accumulate(known["allocated_peak_bytes"])
    index = int(np.searchsorted(steps, first))
    half = (np.median(before["allocated_peak_bytes"]) + after["allocated_peak_bytes"][0]) / 2
    low = max(0, int(np.searchsorted(highest[:index], half)) - 1)
    slope = float(highest[-1] - highest[index]) / max(1, int(steps[-1] - steps[index]))
    has_gap, jump = first - begin > 1, float(highest[index] - highest[low])
    return has_gap and slope * float(steps[index] - steps[low]) >= jump / 2


def _find_ranks(processes: list[Process], rise: PeakRise) -> SharedRise | None:
    """Return the ranks that share a rise; None while others may still have a reading after it.

    The process in which it was found stands for it, unless another one's peak rose much more.
    """
    deadline_ns = find_deadline(rise.process, rise.known_ns, _PATIENCE_NS)
    known = [found for process in processes if (found := _read_rank(process, rise, deadline_ns)) is not None]
    are_all_known = len(known) == len(processes)
    if not are_all_known and rise.process.at.cursor_ns < deadline_ns:
        return None
    largest = max(known, key=lambda one: one.grown_bytes)
    chosen = rise if rise.grown_bytes >= _SHARED_PART * largest.grown_bytes else largest
    ranks = tuple(one.process.rank for one in known if one.grown_bytes >= _SHARED_PART * chosen.grown_bytes)
    others = [one for one in known if one.process.rank not in ranks]
    others_steady = are_all_known and bool(others) and all(one.is_steady for one in others)
    known_ns = max(one.known_ns for one in known) if are_all_known else deadline_ns
    return SharedRise(chosen, ranks, len(ranks) == len(processes), others_steady, known_ns)


def _read_rank(process: Process, rise: PeakRise, deadline_ns: int) -> PeakRise | None:
    """Return a rank's steps before a rise, and its first one after it; None if it has none with a reading."""
    if process is rise.process:
        return rise
    begin, end = rise.between
    steps = process.phased_steps_until(deadline_ns)
    steps = steps[steps["allocated_peak_bytes"] > 0]
    last, first = int(np.searchsorted(steps["step"], begin, "right")), int(np.searchsorted(steps["step"], end))
    if last == 0 or first == len(steps):
        return None
    return PeakRise(process, steps[max(0, last - LEVEL_STEPS) : last], steps[first : first + 1])
