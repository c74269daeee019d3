"""One frame: everything that the screens draw, as one immutable value."""

from __future__ import annotations

from dataclasses import dataclass, field

from zerotop.analysis.failures.end import End
from zerotop.analysis.findings import Finding, Severity
from zerotop.analysis.live_view import LiveView
from zerotop.analysis.reports.end_summary import EndSummary
from zerotop.analysis.reports.finding_costs import FindingCost
from zerotop.ui.base.bars.footer import CursorState, Tab
from zerotop.ui.base.bars.header import Notice, build_notices


@dataclass(frozen=True, slots=True)
class Pane:
    """Output lines; the last ``lines_below`` are below the visible ones."""

    lines: tuple[str, ...]
    lines_below: int = 0
    has_newer: bool = False  # newer lines exist that are not in ``lines``
    seek_count: int = field(default=0, compare=False)  # how often the user moved the cursor


@dataclass(frozen=True, slots=True)
class Frame:
    """The recording at one moment, and the viewer's state."""

    view: LiveView
    moment: CursorState
    output: Pane
    problems: tuple[str, ...]  # the viewer's own sentences, such as about a dead sampler
    findings: tuple[Finding, ...] = ()  # those known at the cursor, by the time they became known
    headline: Finding | None = None  # the one shown under the header,
    headline_cause: Finding | None = None  # and the one that explains it
    all_findings: tuple[Finding, ...] = ()  # of the whole recording: places to go to
    ranked: tuple[FindingCost, ...] = ()  # the same, the costliest first
    tabs: tuple[Tab, ...] = ()  # all screens
    rank: int | None = None  # the chosen rank, else the first one
    is_rank_chosen: bool = False  # by the user
    failure: End | None = None  # what had killed the job before the cursor
    summary: EndSummary | None = None  # of a job that has ended, at its end
    can_control: bool = False  # the job runs and takes requests
    trace_request: int | None = None  # number of the last microscope request
    training: LiveView | None = None  # at the last step of a job that has ended, at its end
    tip: str = ""  # of the demo: what to look at next

    @property
    def state_view(self) -> LiveView:
        """The view for memory and cores: after a job's end, when they are free, that of its last step."""
        return self.view if self.training is None else self.training

    def list_notices(self, height: int) -> list[Notice]:
        """Return the sentences under the header of a terminal of ``height`` rows."""
        told = self.headline, self.headline_cause, self.tip
        return build_notices(self.view, self.problems, *told, roomy=height >= 30, failure=self.failure)

    @property
    def has_error(self) -> bool:
        """Whether the headline is an error."""
        return self.headline is not None and self.headline.severity is Severity.ERROR
