"""The content of the timeline, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zerotop.analysis.findings import Finding
from zerotop.analysis.timeline.range_summary import RangeSummary
from zerotop.analysis.timeline.timeline import ColumnValues, LaneSubject, Timeline
from zerotop.analysis.views.last_loss import LastLogged
from zerotop.ui.charts import GrowingScales
from zerotop.ui.timeline.lanes import LaneBox


@dataclass(frozen=True, slots=True)
class Mark:
    """A finding's mark. ``at_ns`` is in nanoseconds since the recording began."""

    at_ns: int
    style: str
    text: str
    finding: Finding


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A window of a recording and everything in it. Times are nanoseconds since the recording began."""

    timeline: Timeline
    subject: LaneSubject
    boxes: tuple[LaneBox, ...]
    ranks: tuple[int, ...]  # of the ribbons, from top to bottom
    other_ranks: int  # ranks whose ribbons do not fit
    cursor: int
    pointed: int  # the moment of the displayed values: under the mouse, else the cursor
    marks: tuple[Mark, ...]
    faults: tuple[tuple[int, str], ...]  # (time, words) of each that NVML reported of any GPU
    steps: tuple[tuple[int, int], ...]  # (begin, number) in the window
    pointed_step: int | None  # the step in progress then
    selected_range: tuple[int, int] | None
    summary: RangeSummary | None  # of the range
    host_cores: int  # of the host
    missing_notes: tuple[str, ...]  # sentences about missing data
    scales: GrowingScales
    # The last values up to that moment, by name; empty where the columns are as short.
    values_then: Mapping[str, ColumnValues] = field(default_factory=dict)
    logged: Mapping[str, LastLogged] = field(default_factory=dict)  # up to that moment, or up to the cursor, by name
    headline: Mark | None = None  # of the finding under the header
    phases_now: Mapping[int, str] = field(default_factory=dict)  # by rank, at the cursor; none while the mouse points

    @property
    def hidden_headline(self) -> Mark | None:
        """The mark of the finding under the header, if the window does not show it."""
        is_hidden = self.headline is not None and not 0 <= self.find_cell(self.headline.at_ns) < self.cell_count
        return self.headline if is_hidden else None

    @property
    def cell_ns(self) -> int:
        """Nanoseconds per cell: two columns."""
        return 2 * self.timeline.window.column_ns

    @property
    def begin(self) -> int:
        """The window's begin."""
        return self.timeline.window.first * self.timeline.window.column_ns

    @property
    def cell_count(self) -> int:
        """The window's width in cells."""
        return self.timeline.window.columns // 2

    def find_cell(self, moment: int) -> int:
        """Return the cell of a moment; it may be outside the window."""
        return (moment - self.begin) // self.cell_ns

    def find_mark(self, cell: int) -> Mark | None:
        """Return the mark at a cell of the row of marks, or the mark whose words are there."""
        before = [mark for mark in self.marks if 0 <= self.find_cell(mark.at_ns) <= cell]
        return max(before, key=lambda mark: mark.at_ns, default=self.hidden_headline)

    def find_values(self, name: str) -> ColumnValues | None:
        """Return a lane's values, None if there are none."""
        return self.timeline.values.get(name)
