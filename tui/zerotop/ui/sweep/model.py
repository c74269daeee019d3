"""The content of the sweep screen: a sweep in progress, the chosen row, and the colours of its series."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.prices import HourlyPrice
from zerotop.analysis.reports.sweep_verdict import read_sweep_price
from zerotop.analysis.sweeps.line_report import LineReport, report_lines
from zerotop.analysis.sweeps.search import LargestResult
from zerotop.analysis.sweeps.series import TOKENS, SweepSeries, build_series, choose_axis, list_charts
from zerotop.recording.sweeps import Point, PointAttempt, Sweep, Value
from zerotop.ui.base.start_interfaces import OpenedRecording

# For a search, the axis has values up to this many times the largest that fits.
_FARTHEST = 2.0

SERIES_STYLES = tuple(f"series-{number}" for number in (1, 2, 4, 0, 3, 5))


def is_numeric(values: Sequence[Value]) -> bool:
    """Return whether values have distances on an axis."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


class SweepProgress(Protocol):
    """A sweep that another thread runs."""

    sweep: Sweep  # so far; the same object while there is no new result
    is_over: bool
    problem: str  # why it ended early

    @property
    def attempts(self) -> Mapping[int, PointAttempt]:
        """The attempts that run now, by point."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the sweep began, or went on."""

    def estimate_left_s(self) -> float | None:
        """Return the seconds that the rest should take; None before the first result."""

    def is_stopping(self) -> bool:
        """Return whether the sweep was asked to stop."""

    def stop(self) -> None:
        """Stop the jobs that run now, and the sweep."""

    def open_point(self, number: int) -> OpenedRecording | None:
        """Open the recording of a point; None if it has none. Raises RecordingError."""


@dataclass
class EndedSweep:
    """A sweep that no thread runs."""

    sweep: Sweep
    open_point: Callable[[int], OpenedRecording | None]
    is_over: bool = True
    problem: str = ""
    attempts: Mapping[int, PointAttempt] = field(default_factory=dict)
    elapsed_s: float = 0.0

    def estimate_left_s(self) -> float | None:
        return None

    def is_stopping(self) -> bool:
        return False

    def stop(self) -> None:
        """Do nothing: nothing runs."""


class SearchProgress(Protocol):
    """The search for the largest values that fit, which ``zerotop fit`` runs as a sweep."""

    searched: str  # the setting to maximize
    results: tuple[LargestResult, ...]  # of all series that were begun; those of the series in progress come last
    series_count: int  # of all series to search
    runs: int  # so far, attempts after a crash included
    most_runs: int


class PlacedChart(NamedTuple):
    """The place of a chart in the last picture; its title is in the first row."""

    measurement: str
    left: int
    top: int
    width: int
    height: int

    def holds(self, x: int, y: int) -> bool:
        """Return whether a cell is on the chart."""
        return 0 <= x - self.left < self.width and 0 <= y - self.top < self.height


@dataclass
class SweepModel:
    """The state of the screen."""

    progress: SweepProgress
    shape: ModelShape | None = None  # of the model
    search: SearchProgress | None = None  # of ``zerotop fit``
    cursor_row: int = 0
    top_row: int = 0
    visible_rows: int = 0
    is_following: bool = True  # the cursor stays at the point that runs
    table_top: int = 0  # row of the first point in the last picture
    placed_charts: list[PlacedChart] = field(default_factory=list)  # in the last picture
    pointed: tuple[int, int] | None = None  # cell under the mouse
    zoomed: tuple[int, int] | None = None  # begin and end among the axis' values; None shows all
    _derived_from: Sweep | None = field(default=None, repr=False)
    _series: list[SweepSeries] = field(default_factory=list, repr=False)
    _reports: list[LineReport] = field(default_factory=list, repr=False)

    @property
    def sweep(self) -> Sweep:
        """The sweep so far."""
        return self.progress.sweep

    @property
    def axis(self) -> str:
        """The setting of the charts' horizontal axis."""
        return choose_axis(self.sweep.plan)

    @property
    def listed_points(self) -> Sequence[Point]:
        """The points in the order of the table: those of a search by series and then by the value that it tried."""
        points = self.sweep.points
        if self.search is None:
            return points
        searched, series = self.search.searched, list[dict[str, Value]]()
        keys = {}
        for point in points:
            own = {name: value for name, value in point.settings.items() if name != searched}
            if own not in series:
                series.append(own)
            keys[point.number] = series.index(own), int(point.settings[searched])
        return sorted(points, key=lambda point: keys[point.number])

    @property
    def shown_values(self) -> Sequence[Value]:
        """The values on the horizontal axis: numbers ascending, words in their order."""
        values = self._list_values()
        begin, end = self.zoomed or (0, len(values))
        return values[begin:end] or values

    def _list_values(self) -> Sequence[Value]:
        """Return all values of the axis; for a search, those that it tried, and none far above the largest that fits."""
        values = list(self.sweep.plan.settings[self.axis])
        if self.search is not None:
            most = _FARTHEST * max((one.largest for one in self.search.results if one.largest is not None), default=math.inf)
            tried = {point.settings[self.axis] for point in self.sweep.points}
            values = [value for value in values if value in tried and int(value) <= most] or values
        return sorted(values, key=float) if is_numeric(values) else values

    def zoom(self, direction: int, share: float) -> None:
        """Show fewer values of the axis, or more where ``direction`` is negative, around a share of the width."""
        most = len(self._list_values())
        begin, end = self.zoomed or (0, most)
        count = end - begin
        wanted = max(2, count - max(1, count // 4)) if direction > 0 else min(most, count + max(1, count // 3))
        begin = max(0, min(most - wanted, round(begin + (count - wanted) * share)))
        self.zoomed = (begin, begin + wanted) if wanted < most else None

    def find_chart(self, x: int, y: int) -> PlacedChart | None:
        """Return the chart at a cell of the last picture."""
        return next((placed for placed in self.placed_charts if placed.holds(x, y)), None)

    @property
    def charts(self) -> tuple[str, ...]:
        """The measurements with a chart; for a search only memory and tokens per second."""
        charts = list_charts(self.sweep)
        return charts if self.search is None else (charts[0], TOKENS)

    @property
    def price(self) -> HourlyPrice | None:
        return read_sweep_price(self.sweep)

    @property
    def series(self) -> Sequence[SweepSeries]:
        """All series, in a stable order."""
        self._compute_series()
        return self._series

    @property
    def reports(self) -> Sequence[LineReport]:
        """The fitted lines."""
        self._compute_series()
        return self._reports

    def _compute_series(self) -> None:
        """Compute series and lines once for each result."""
        sweep = self.sweep
        if self._derived_from is not sweep:
            self._series = build_series(sweep, self.axis) if self.axis else []
            self._reports = report_lines(sweep, self.shape)
            self._derived_from = sweep

    def find_style(self, settings: Mapping[str, Value]) -> str:
        """Return the style of the series that the settings belong to; "muted" for one that has not run."""
        for number, series in enumerate(self.series):
            if all(settings[name] == value for name, value in series.settings.items()):
                return SERIES_STYLES[number % len(SERIES_STYLES)]
        return "muted"

    def move_cursor(self, rows: int) -> None:
        """Move the cursor, which then no longer follows the sweep."""
        self.is_following = False
        self.cursor_row = max(0, min(len(self.sweep.points) - 1, self.cursor_row + rows))

    def follow(self) -> None:
        """Keep the cursor on the point that runs."""
        self.is_following = True

    def place_cursor(self) -> None:
        """Move the cursor to the point that runs, if it follows."""
        if self.is_following:
            points = self.sweep.points
            followed = max(self.progress.attempts, default=points[-1].number if points else None)
            numbers = [point.number for point in self.listed_points]
            self.cursor_row = numbers.index(followed) if followed in numbers else 0

    def scroll_to_cursor(self, rows: int) -> None:
        """Scroll so that the cursor is among ``rows`` visible rows."""
        self.visible_rows = rows
        last = max(0, len(self.sweep.points) - rows)
        self.top_row = min(last, max(self.cursor_row - rows + 1, min(self.top_row, self.cursor_row)))
