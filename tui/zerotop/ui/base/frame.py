"""One frame: everything that the screens draw, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from zerotop.analysis.annotations import Annotation, Severity
from zerotop.analysis.failures.failure import Failure
from zerotop.analysis.live_view import LiveView
from zerotop.ui.base.footer import CursorState, Tab
from zerotop.ui.base.header import Notice, build_notices
from zerotop.ui.live.output import Pane


@dataclass(frozen=True, slots=True)
class Frame:
    """What is shown now."""

    view: LiveView
    moment: CursorState
    output: Pane
    fps: float
    problems: tuple[str, ...]  # sentences of the viewer's own: a dead sampler
    findings: tuple[Annotation, ...] = ()  # known at the cursor, in the order in which they became known
    headline: Annotation | None = None  # the one of them to say under the header
    all_findings: tuple[Annotation, ...] = ()  # of the whole recording, later ones too: places to go to
    tabs: tuple[Tab, ...] = ()  # the screens there are
    rank: int | None = None  # the one that was chosen, else the first one there is
    failure: Failure | None = None  # what had killed the job by the cursor
    can_steer: bool = False  # the job runs and can be asked for something
    trace_request: int | None = None  # the number of the look through the microscope that was asked for last

    def list_notices(self, height: int) -> list[Notice]:
        """The sentences under the header of a terminal with so many rows."""
        return build_notices(self.view, self.problems, self.headline, roomy=height >= 30)

    @property
    def has_error(self) -> bool:
        """Whether they say what went wrong."""
        return self.headline is not None and self.headline.severity is Severity.ERROR
