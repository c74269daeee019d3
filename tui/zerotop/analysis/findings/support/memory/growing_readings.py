"""Readings of a process's allocated memory at the ends of steps, and stretches of them that rise."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.findings.support.evidence import Floats, Group, Ints, Process, Rows
from zerotop.analysis.findings.support.memory.floor_rises import FloorSearch, LevelRises
from zerotop.analysis.findings.support.memory.phase_peaks import read_held_bytes
from zerotop.analysis.findings.support.steps.growing_batches import follow_steps, get_batch_sizes, spread_sizes
from zerotop.analysis.findings.support.thresholds import CREEP_BYTES
from zerotop.analysis.findings.support.window import SearchWindow
from zerotop.analysis.stats.change_points import SETTLED_STEPS
from zerotop.analysis.stats.trend import TrendFinder
from zerotop.recording.steps.growable_array import GrowingArray

# Rises in a row. A leak grows in every step, or in every tenth, where the loop logs: between two rises memory never falls.
CREEP_STEPS = 12
# Where steps take at least so long (s), a job has few of them: so many rises in a row are enough, or steps that they span.
_LONG_STEP_S, _LONG_STEPS = 0.25, 10
# In the later half of a rise with level parts, memory grows by at least this share of what the earlier half added: what is
# allocated once for each new shape of a batch comes ever more rarely.
_LATER_SHARE = 0.5
# A rise before a level of so many times the usual readings is another one.
_LONG_LEVELS = 4
# Where batches differ in size, and with them what a step leaves: blocks of readings in order, by how much each is higher
# than the one before (a share of an even rise), and the part of the rise that is left without the batches' sizes.
_TREND_BLOCKS, _TREND_EVENNESS, _OWN_SHARE = 6, 0.2, 0.5
# The usual growth a step is that of the whole stretch but for a jump, within this factor; growth that is at least so many
# times as fast as what went before it is a stretch of its own, from a few rises on that are alike.
_SAME_FACTOR, _FASTER, _FASTER_RISES = 1.5, 2, 3
# Where most steps are only counted: readings in a row that are higher than any before, and how many steps they span.
SPARSE_RECORDS, _SPARSE_SPAN = 5, 2 * CREEP_STEPS
# Fewer readings suffice where each step adds as much: rises between readings, by how much they differ at most, and how many
# steps they span.
_EVEN_RISES, _EVEN_FACTOR, _EVEN_SPAN = 3, 1.1, CREEP_STEPS


class ReserveGrowth(NamedTuple):
    """What PyTorch reserved but did not use even at the peak of a step, where it has become ever more (bytes)."""

    reserved_bytes: int
    unused_bytes: int
    grown_bytes: int
    per_step: float
    """By how much the reserve has grown a step in the later half."""


class GrowthStretch(NamedTuple):
    """Readings of a process's memory that rise.

    ``first``: the index of the reading before them, which is the first of ``held``, the bytes after each step.
    """

    process: Process
    first: int
    before_step: int
    rows: Rows
    held: Ints

    @property
    def steps(self) -> Ints:
        """The steps after which the bytes were held, shape (n + 1,)."""
        return np.concatenate([[self.before_step], self.rows["step"]])

    @property
    def slope(self) -> float:
        """The growth in bytes a step."""
        return measure_slope(self.steps, self.held)

    @property
    def longest_level(self) -> int:
        """The most steps between two new maxima."""
        steps = self.steps
        highest = np.maximum.accumulate(self.held)
        return int(np.diff(steps[np.diff(highest, prepend=-1) > 0]).max(initial=1))

    @property
    def is_creep(self) -> bool:
        """Whether it has enough rises and bytes, and continues."""
        rises = int(np.count_nonzero(np.diff(self.held)))
        creep_steps, sparse_span = (_LONG_STEPS, _LONG_STEPS) if self._is_of_long_steps else (CREEP_STEPS, _SPARSE_SPAN)
        is_sparse = rises == len(self.rows) and int(self.rows["step"][-1]) - self.before_step >= sparse_span
        is_enough = rises >= (_EVEN_RISES if is_sparse else creep_steps)
        return is_enough and self._measure_growth() >= CREEP_BYTES and self.keeps_pace and not self.grows_with_sizes

    @property
    def _is_of_long_steps(self) -> bool:
        """Whether the steps are long, and memory was never as high before: what rises and falls is no leak."""
        if not float(np.nanmedian(self.rows["iteration_s"])) >= _LONG_STEP_S:
            return False
        before = MemoryReadings.read(self.process).held[: self.first]
        return int(self.held[-1]) - int(before.max(initial=0)) >= CREEP_BYTES

    def _measure_growth(self) -> int:
        """Return by how many bytes memory grew in all, without one rise that is most of it: that is no leak."""
        grown, largest = int(self.held[-1] - self.held[0]), int(np.diff(self.held).max())
        return grown - largest if 2 * largest > grown else grown

    def find_faster(self) -> int:
        """Return the index of the reading since which memory has grown several times as fast; 0 without one."""
        steps, highest = self.steps, np.maximum.accumulate(self.held)
        even = highest[0] + (highest[-1] - highest[0]) * ((steps - steps[0]) / max(1, int(steps[-1] - steps[0])))
        begin = int(np.argmax(even - highest))
        if begin <= 1 or begin + 1 >= len(steps):  # before the first rise it had not begun
            return 0
        early = (highest[begin] - highest[0]) / max(1, int(steps[begin] - steps[0]))
        late = (highest[-1] - highest[begin]) / max(1, int(steps[-1] - steps[begin]))
        rises = np.diff(highest[begin:])
        is_even = len(rises) >= _FASTER_RISES and (rises >= late / _FASTER * np.diff(steps[begin:])).all()
        return begin if late >= _FASTER * early and (is_even or np.count_nonzero(rises) >= CREEP_STEPS) else 0

    @property
    def keeps_pace(self) -> bool:
        """Whether memory grows in each step, or about as fast in the later half as in the earlier one."""
        rises, half = np.diff(self.held), len(self.held) // 2
        if (rises > 0).all():
            return True
        if (rises < 0).any():
            earlier, later = (measure_slope(self.steps[part], self.held[part]) for part in (slice(half), slice(half, None)))
            return later >= _LATER_SHARE * earlier > 0
        middle = int(np.searchsorted(self.steps, (self.before_step + int(self.rows["step"][-1])) // 2, "right")) - 1
        return bool(self.held[-1] - self.held[middle] >= _LATER_SHARE * (self.held[middle] - self.held[0]))

    @property
    def is_by_batches(self) -> bool:
        """Whether larger batches may be the reason, of which some is still alive after a step."""
        sizes = self._known_sizes
        if sizes is None or self.follows_sizes:
            return True
        if not np.ptp(sizes):
            return False
        steps, held = (np.asarray(one, np.float64) for one in (self.rows["step"], self.held[1:]))
        terms = np.stack([np.ones(len(steps)), sizes, steps], axis=1)
        grown = float(np.linalg.lstsq(terms, held)[0][2]) * np.ptp(steps)
        return bool(grown < _OWN_SHARE * self.slope * np.ptp(steps))

    @property
    def _known_sizes(self) -> Floats | None:
        known = [self.rows[name] for name in ("tokens", "rows") if (self.rows[name] > 0).all()]
        return np.asarray(known[0], np.float64) if known else None

    @property
    def grows_with_sizes(self) -> bool:
        """Whether memory grows where batches do, and hardly from one step to the next of the same size.

        Where each step is larger than the one before, the two cannot be told apart.
        """
        sizes = spread_sizes(self.rows)
        known = sizes[sizes > 0]
        if not len(known) or not np.ptp(known) or (np.diff(known) < 0).any():
            return False
        grown, is_same = np.diff(self.held)[1:], (sizes[1:] == sizes[:-1]) & (sizes[1:] > 0)
        if np.count_nonzero(is_same) < SPARSE_RECORDS:
            return self.follows_sizes
        return bool(grown[is_same].mean() < _OWN_SHARE * grown.mean())

    @property
    def may_be_growth(self) -> bool:
        """Whether batches that grow may be the reason."""
        return self.follows_sizes or self.grows_with_sizes

    @property
    def follows_sizes(self) -> bool:
        """Whether batches are known to grow with the steps themselves."""
        return follow_steps(get_batch_sizes(self.rows), self.rows["step"])

    @property
    def reserve_growth(self) -> ReserveGrowth | None:
        """How the unused reserve grows, if by more than the memory held: new blocks, such as larger ones, do not fit in."""
        rows = self.rows[(self.rows["allocated_peak_bytes"] > 0) & (self.rows["reserved_peak_bytes"] > 0)]
        steps, reserved = rows["step"], rows["reserved_peak_bytes"].astype(np.int64)
        unused = reserved - rows["allocated_peak_bytes"].astype(np.int64)
        if np.count_nonzero(np.diff(unused) > 0) < SPARSE_RECORDS:
            return None
        middle = int(np.searchsorted(steps, (steps[0] + steps[-1]) // 2, "right")) - 1
        earlier, later = int(unused[middle] - unused[0]), int(unused[-1] - unused[middle])
        if later < max(CREEP_BYTES, _LATER_SHARE * earlier) or earlier + later < self.held[-1] - self.held[0]:
            return None
        per_step = float(reserved[-1] - reserved[middle]) / max(1, int(steps[-1] - steps[middle]))
        if per_step <= 0:  # what is used shrinks in a reserve that stays
            return None
        return ReserveGrowth(int(reserved[-1]), int(unused[-1]), int(unused[-1] - unused[0]), per_step)

    @property
    def last_step(self) -> int | None:
        """The step in which the device will be full, of what is allocated or reserved; None if that is unknown."""
        peak, device = int(self.rows["allocated_peak_bytes"][-1]), self.process.device_bytes
        if not device or peak <= 0 or (slope := self.slope) <= 0:
            return None
        left = (device - peak) / slope
        if (reserve := self.reserve_growth) is not None:
            left = min(left, (device - reserve.reserved_bytes) / reserve.per_step)
        return int(self.rows["step"][-1]) + int(left)

    @property
    def left_ns(self) -> float:
        """The time until then."""
        last_step, duration_s = self.last_step, float(np.nanmedian(self.rows["iteration_s"]))
        return inf if last_step is None else duration_s * 1e9 * max(0, last_step - int(self.rows["step"][-1]))

    @property
    def begin_ns(self) -> int:
        return int(self.rows["begin_unix_ns"][0])

    @property
    def end_ns(self) -> int:
        return int(self.rows["end_unix_ns"][-1])


def measure_slope(steps: Ints, held: Ints) -> float:
    """Return the growth in bytes a step: the usual one from a rise to the next, if that makes up the growth in all.

    It is that between the ends where memory falls.
    """
    if (np.diff(held) < 0).any():
        ends = slice(max(1, len(held) // _TREND_BLOCKS)), slice(-max(1, len(held) // _TREND_BLOCKS), None)
        (first, last), (low, high) = ([float(np.median(one[end])) for end in ends] for one in (steps, held))
        return (high - low) / max(1.0, last - first)
    rises = np.flatnonzero(np.diff(held, prepend=-1))
    if len(rises) < 2:
        return 0.0
    grown, spans = np.diff(held[rises]), np.maximum(1, np.diff(steps[rises]))
    usual = float(np.median(grown / spans))
    # It may have begun anywhere before the first rise.
    largest = int(np.argmax(grown[1:])) + 1 if len(grown) > 1 else 0
    is_counted = np.arange(len(grown)) > 0
    is_counted[largest] = 2 * grown[largest] <= grown.sum()
    whole = float(grown[is_counted].sum() / max(1, spans[is_counted].sum()))
    return usual if not is_counted.any() or whole / _SAME_FACTOR <= usual <= whole * _SAME_FACTOR else whole


_new_trend_finder = partial(TrendFinder, _TREND_BLOCKS, _TREND_EVENNESS)


_CHANGE_DTYPE = np.dtype([(name, np.int64) for name in ("reading", "step", "held", "base", "highest", "record_base")])


class MemoryReadings:
    """The readings of a process's memory at the ends of steps: the indices of the steps, and bytes.

    Changes are the readings that differ from the one before. Each has the indices of the last change up to it without growth
    (``base``), and that is no new maximum (``record_base``).
    """

    def __init__(self, process: Process) -> None:
        self._process, self._searched = process, 0
        self._indices, self._held, self._changes = (GrowingArray(one) for one in (np.int64, np.int64, _CHANGE_DTYPE))

    @classmethod
    def read(cls, process: Process) -> MemoryReadings:
        """Return the readings of all steps up to now, each of which is read once."""
        readings = process.derive(cls)
        readings._add_new()
        return readings

    @property
    def indices(self) -> Ints:
        """The indices of the steps of all readings."""
        return self._indices.rows

    @property
    def held(self) -> Ints:
        """The bytes of all readings."""
        return self._held.rows

    @property
    def changes(self) -> Rows:
        """The readings that differ from the one before."""
        return self._changes.rows

    def _add_new(self) -> None:
        fresh = self._process.steps[self._searched :]
        if not len(fresh):
            return
        held = read_held_bytes(self._process, fresh)
        known = np.flatnonzero(held >= 0)
        before = self._held.rows[-1:].tolist()
        changed = np.flatnonzero(np.diff(held[known], prepend=before or [-1]))
        self.add_changes(len(self._held) + changed, fresh["step"][known[changed]], held[known[changed]])
        self._indices.add_rows(len(known))[:] = known + self._searched
        self._held.add_rows(len(known))[:] = held[known]
        self._searched += len(fresh)

    def add_changes(self, readings: Ints, steps: Ints, held: Ints) -> None:
        """Add changes: the indices of their readings, the numbers of the steps, and bytes."""
        if not len(held):
            return
        first, rows = len(self._changes), self._changes.add_rows(len(held))
        rows["reading"], rows["step"], rows["held"], rows["highest"] = readings, steps, held, np.maximum.accumulate(held)
        last = self._changes.rows[max(0, first - 1)]  # the first of all begins with itself
        rows["highest"] = np.maximum(rows["highest"], last["highest"])
        indices = np.arange(first, first + len(held))
        for base, column in (("base", "held"), ("record_base", "highest")):
            grows = held > np.concatenate([[last[column]], rows[column][:-1]])
            rows[base] = np.maximum.accumulate(np.where(grows, last[base] if first else 0, indices))

    def list_long(self, first: int) -> Iterator[tuple[int, list[int]]]:
        """Yield each stretch that is long enough to report since change ``first``: its base, and its changes since then."""
        rows = self._changes.rows
        new, indices = rows[first:], np.arange(first, len(rows))
        if not (new["base"] < indices).any():  # as where nothing leaks
            return
        base, records = rows[new["base"]], indices - new["record_base"]
        is_sparse = (records >= SPARSE_RECORDS) | (self._find_even(first) & (records > _EVEN_RISES))
        # Whether these suffice depends on how long the steps take.
        is_long = (indices - new["base"] >= _LONG_STEPS) | (is_sparse & (new["step"] - base["step"] >= _LONG_STEPS))
        enough = np.flatnonzero((new["base"] < indices) & is_long & (new["held"] - base["held"] >= CREEP_BYTES))
        for base in np.unique(new["base"][enough]).tolist():
            yield base, (first + enough[new["base"][enough] == base]).tolist()

    def _find_even(self, first: int) -> NDArray[np.bool_]:
        """Return whether memory rose by about as much a step in the changes up to each new one."""
        near, is_even = self._changes.rows[max(0, first - _EVEN_RISES) :], np.zeros(len(self._changes) - first, np.bool_)
        if len(near) > _EVEN_RISES:
            rises = np.diff(near["held"]) / np.maximum(1, np.diff(near["step"]))
            last = np.lib.stride_tricks.sliding_window_view(rises, _EVEN_RISES)
            spans = near["step"][_EVEN_RISES:] - near["step"][:-_EVEN_RISES]
            alike = (last.min(1) > 0) & (last.max(1) <= _EVEN_FACTOR * last.min(1)) & (spans >= _EVEN_SPAN)
            is_even[-len(last) :] = alike
        return is_even

    def select(self, begin: int, end: int | None = None) -> tuple[Rows, Ints]:
        return self._process.steps[self._indices.rows[begin:end]], self._held.rows[begin:end]

    def select_times(self, begin: int) -> tuple[Ints, Ints, Ints]:
        """Return the steps' numbers and ends (unix nanoseconds), and bytes, of the readings from ``begin`` on."""
        indices = self._indices.rows[begin:]
        steps = self._process.steps
        return steps["step"][indices], steps["end_unix_ns"][indices], self._held.rows[begin:]

    def select_rise(self, begin: int, end: int) -> GrowthStretch:
        """Return the stretch between two changes, from the reading before its first rise but for one long before."""
        rises = self._changes.rows["reading"][begin + 1 : end + 1]
        levels = np.diff(rises)
        alone = np.flatnonzero(levels > _LONG_LEVELS * np.median(levels)) if len(levels) else levels
        first = int(alone[-1]) + 1 if len(alone) else 0
        stretch = self.select_stretch(int(rises[first]) - 1, int(rises[-1]) + 1)
        return self.select_stretch(stretch.first + stretch.find_faster(), int(rises[-1]) + 1)

    def select_stretch(self, begin: int, end: int) -> GrowthStretch:
        rows, held = self.select(begin, end)
        return GrowthStretch(self._process, begin, int(rows["step"][0]), rows[1:], held)


def read_stretches(window: SearchWindow[Group], process: Process) -> list[GrowthStretch]:
    """Return the stretches that new readings of a process show."""
    stretches = []
    readings = MemoryReadings.read(process)
    for base, ends in readings.list_long(window.steps(readings.changes, of=process).start):
        end = window.find_once(partial(_find_creep, readings, base, ends), (process, base))
        if end in ends:  # not found before
            stretches.append(readings.select_rise(base, end))
    # These three read each reading once, however long the job is.
    levels = window.keep(LevelRises, process).read_new(readings.held)
    if levels is not None:
        rise = readings.select_stretch(*levels)
        if int(rise.rows["step"][-1]) - rise.before_step >= _SPARSE_SPAN and not rise.may_be_growth:
            stretches.append(rise)
    known_steps, _, known_held = readings.select_times(0)
    floor = window.keep(FloorSearch, process).find_rise(known_steps, known_held)
    if floor is not None:
        rise = readings.select_stretch(*floor)
        if not rise.may_be_growth:
            stretches.append(rise)
    finder = window.keep(_new_trend_finder, process)
    for trend in finder.find_rises(readings.held, SETTLED_STEPS, share=0, least=CREEP_BYTES):
        rise = readings.select_stretch(trend.begin, trend.end)
        if (np.diff(rise.held) < 0).any() and rise.keeps_pace and not rise.is_by_batches:
            stretches.append(rise)
    return stretches


def _find_creep(readings: MemoryReadings, base: int, ends: list[int]) -> int | None:
    return next((end for end in ends if readings.select_rise(base, end).is_creep), None)
