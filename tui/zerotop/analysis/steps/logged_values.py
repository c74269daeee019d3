"""The loss, gradient norm and learning rate of a training, as its ranks recorded them, else as the job printed them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zerotop.analysis.output.logged_lines import LoggedLine, LoggedLines
from zerotop.analysis.stats.medians import compute_known_median
from zerotop.recording.reader import Recording, Source
from zerotop.recording.samples import Floats, Ints, Rows
from zerotop_probe.recording.tables import LOGGED, LOGGED_BITS, UNKNOWN

# What a job prints is read this often.
_READ_NS = 50_000_000
NAMES = tuple(metric.name for metric in LOGGED.metrics)


class LoggedSeries(NamedTuple):
    """The values of one name, in the order of their times."""

    times: Ints  # unix nanoseconds
    values: Floats  # NaN is a value that was logged

    def until(self, cursor_ns: int) -> LoggedSeries:
        """Return the values up to a moment."""
        count = int(np.searchsorted(self.times, cursor_ns, "right"))
        return LoggedSeries(self.times[:count], self.values[:count])


NO_VALUES = LoggedSeries(np.empty(0, np.int64), np.empty(0))


class LoggedReader:
    """The logged values of a recording, which may grow."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._lines = LoggedLines(recording)
        self._taken: list[LoggedLine] | None = None  # the lines of which
        self._taken_count = 0  # so many
        self._printed: dict[str, LoggedSeries] = {}  # are in here
        self._counts: tuple[int, ...] = ()
        self._series: dict[str, LoggedSeries] = {}

    def read(self) -> dict[str, LoggedSeries]:
        """Return all values so far by the names of LOGGED's metrics; a name without any is missing."""
        sources = [*self._recording.sources["logged"], *self._recording.sources["output"]]
        counts = tuple(len(source.array) for source in sources)
        if counts != self._counts:
            self._counts = counts
            recorded, printed = self._read_recorded(), self._read_printed()
            # By name: an engine records its learning rate alone.
            self._series = printed | recorded
        return self._series

    def _read_recorded(self) -> dict[str, LoggedSeries]:
        tables = [source for source in self._recording.sources["logged"] if len(source.array)]
        found: dict[str, LoggedSeries] = {}
        for name in NAMES:
            known = [source for source in tables if (source.array["known"] & LOGGED_BITS[name]).any()]
            lowest = min((source.rank for source in known), default=-1)
            if known:
                found[name] = _join_series([_read_table(source, name) for source in known if source.rank == lowest])
        return found

    def _read_printed(self) -> dict[str, LoggedSeries]:
        lines = self._lines.update()
        if lines is not self._taken:
            self._taken, self._taken_count, self._printed = lines, 0, {}
        fresh = sorted(lines[self._taken_count :], key=lambda line: line.time_ns)
        if fresh:
            last_ns = max((int(series.times[-1]) for series in self._printed.values()), default=0)
            times = _spread_times(np.array([line.time_ns for line in fresh], np.int64), last_ns)
            for name in NAMES:
                known = [place for place, line in enumerate(fresh) if name in line.values]
                if known:
                    new = LoggedSeries(times[known], np.array([fresh[place].values[name] for place in known]))
                    self._printed[name] = _join_series([self._printed.get(name, NO_VALUES), new])
            self._taken_count = len(lines)
        return self._printed


def _spread_times(times: Ints, last_ns: int) -> Ints:
    """Spread lines that were read together, and so have the same time, over the time before it, since ``last_ns``."""
    begins = np.flatnonzero(np.diff(times, prepend=-1))
    counts = np.diff(np.append(begins, len(times)))
    room = np.clip(np.diff(times[begins], prepend=last_ns), 0, _READ_NS)
    behind = np.repeat(begins + counts, counts) - np.arange(len(times)) - 1  # lines of the same time after each
    spread: Ints = times - behind * np.repeat(room, counts) // np.repeat(counts, counts)
    return spread


def _read_table(source: Source, name: str) -> LoggedSeries:
    rows: Rows = source.array[(source.array["known"] & LOGGED_BITS[name]) > 0]
    return LoggedSeries(source.unix_times(rows), rows[name].astype(np.float64))


def _join_series(several: Sequence[LoggedSeries]) -> LoggedSeries:
    times, values = (np.concatenate(columns) for columns in zip(*several, strict=True))
    if (np.diff(times) < 0).any():  # of several nodes or processes
        order = np.argsort(times, kind="stable")
        times, values = times[order], values[order]
    return LoggedSeries(times, values)


def read_logged(recording: Recording) -> dict[str, LoggedSeries]:
    """Return all logged values by name; see :meth:`LoggedReader.read`."""
    if LoggedReader not in recording.kept:
        recording.kept[LoggedReader] = LoggedReader(recording)
    series: dict[str, LoggedSeries] = recording.kept[LoggedReader].read()
    return series


def find_steps(rows: Rows, times: Ints) -> Ints:
    """Return the step (STEP_DTYPE) that a value of each of these times, of one name, belongs to; UNKNOWN without a step.

    Scripts print a loss after the step, or between its forward and its update.
    """
    if not len(rows):
        return np.full(len(times), UNKNOWN)
    after = np.searchsorted(rows["end_unix_ns"], times, "right")
    inside = np.flatnonzero((after > 0) & (after < len(rows)))
    following = rows[after[inside]]
    left_s = (following["end_unix_ns"] - times[inside]) / 1e9
    is_computed = left_s < following["step_s"] + following["backward_s"] + following["forward_s"] / 2
    after[inside[is_computed]] += 1
    return _make_even(rows["step"][np.maximum(after, 1) - 1].astype(np.int64), rows)


def _make_even(steps: Ints, rows: Rows) -> Ints:
    """Return steps that are equally far apart if these are so but for the delay with which short steps' lines are read."""
    distance = round((steps[-1] - steps[0]) / (len(steps) - 1)) if len(steps) > 2 else 0
    begins = steps - distance * np.arange(len(steps))
    delay = 2 * _READ_NS / 1e9 / max(compute_known_median(rows["iteration_s"]), 1e-3)
    if not distance or not 0 < np.ptp(begins) <= delay:
        return steps
    even: Ints = steps - begins + begins.min()
    # Where some steps have two values, as of an engine and its monitor, they would begin before the first step.
    return even if even[0] >= rows["step"][0] else steps
