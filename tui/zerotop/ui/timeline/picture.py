"""What the timeline draws, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from zerotop.analysis.timeline.range_summary import RangeSummary
from zerotop.analysis.timeline.timeline import ColumnValues, Subject, Timeline
from zerotop.ui.charts import GrowingScales
from zerotop.ui.timeline.lanes import LaneBox


@dataclass(frozen=True, slots=True)
class Mark:
    """Something found. ``at`` in nanoseconds since the session's begin."""

    at_ns: int
    style: str
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A window of a recording with all that lies on it. Times are nanoseconds since the session's begin."""

    timeline: Timeline
    subject: Subject
    boxes: tuple[LaneBox, ...]
    ranks: tuple[int, ...]  # of the ribbons, from the uppermost down
    other_ranks: int  # for whose ribbons there is no room
    cursor: int
    marks: tuple[Mark, ...]
    steps: tuple[tuple[int, int], ...]  # (begin, number) of those in the window
    cursor_step: int | None  # in progress at the cursor
    selected_range: tuple[int, int] | None
    summary: RangeSummary | None  # of the range
    host_cores: int  # of the host
    missing_notes: tuple[str, ...]  # sentences about what was not recorded
    scales: GrowingScales

    @property
    def cell_ns(self) -> int:
        """How much time a cell is: two columns."""
        return 2 * self.timeline.window.column_ns

    @property
    def begin(self) -> int:
        """Where the window begins."""
        return self.timeline.window.first * self.timeline.window.column_ns

    @property
    def cell_count(self) -> int:
        """How wide it is."""
        return self.timeline.window.columns // 2

    def find_cell(self, moment: int) -> int:
        """In which cell a moment lies; it may be one that is not seen."""
        return (moment - self.begin) // self.cell_ns

    def find_values(self, name: str) -> ColumnValues | None:
        """A value, if there is any of it."""
        return self.timeline.values.get(name)
