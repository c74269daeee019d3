"""One frame: everything that the screens draw, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from zerotop.analysis.annotations import Annotation, Severity
from zerotop.analysis.failures.failure import Failure
from zerotop.analysis.live_view import LiveView
from zerotop.ui.base.footer import Key, Moment, Tab
from zerotop.ui.base.header import Notice, notices
from zerotop.ui.live.output import Pane


@dataclass(frozen=True, slots=True)
class Frame:
    """What is shown now."""

    view: LiveView
    moment: Moment
    output: Pane
    fps: float
    problems: tuple[str, ...]  # sentences of the viewer's own: a dead sampler
    keys: tuple[Key, ...]  # the keys worth naming now
    findings: tuple[Annotation, ...] = ()  # known at the cursor, in the order in which they became known
    told: Annotation | None = None  # the one of them to say under the header
    known: tuple[Annotation, ...] = ()  # of the whole recording, later ones too: places to go to
    tabs: tuple[Tab, ...] = ()  # the screens there are
    rank: int | None = None  # the one that was chosen, else the first one there is
    failure: Failure | None = None  # what had killed the job by the cursor
    steered: bool = False  # the job runs and can be asked for something
    asked: int | None = None  # the number of the look through the microscope that was asked for last

    def notices(self, height: int) -> list[Notice]:
        """The sentences under the header of a terminal with so many rows."""
        return notices(self.view, self.problems, self.told, roomy=height >= 30)

    @property
    def failed(self) -> bool:
        """Whether they say what went wrong."""
        return self.told is not None and self.told.severity is Severity.ERROR
