"""What the timeline draws, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from zerotop.analysis.timeline.range_summary import Summary
from zerotop.analysis.timeline.timeline import Subject, Timeline, Values
from zerotop.ui.charts import Watched
from zerotop.ui.timeline.lanes import Place


@dataclass(frozen=True, slots=True)
class Mark:
    """Something found. ``at`` in nanoseconds since the session's begin."""

    at: int
    style: str
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A window of a recording with all that lies on it. Times are nanoseconds since the session's begin."""

    timeline: Timeline
    subject: Subject
    places: tuple[Place, ...]
    ranks: tuple[int, ...]  # of the ribbons, from the uppermost down
    other_ranks: int  # for whose ribbons there is no room
    cursor: int
    marks: tuple[Mark, ...]
    steps: tuple[tuple[int, int], ...]  # (begin, number) of those in the window
    step: int | None  # in progress at the cursor
    range: tuple[int, int] | None
    summary: Summary | None  # of the range
    cores: int  # of the host
    missing: tuple[str, ...]  # sentences about what was not recorded
    scales: Watched

    @property
    def cell_ns(self) -> int:
        """How much time a cell is: two columns."""
        return 2 * self.timeline.window.column_ns

    @property
    def begin(self) -> int:
        """Where the window begins."""
        return self.timeline.window.first * self.timeline.window.column_ns

    @property
    def cells(self) -> int:
        """How wide it is."""
        return self.timeline.window.columns // 2

    def cell(self, moment: int) -> int:
        """In which cell a moment lies; it may be one that is not seen."""
        return (moment - self.begin) // self.cell_ns

    def value(self, name: str) -> Values | None:
        """A value, if there is any of it."""
        return self.timeline.values.get(name)
