"""What the memory screen is about, without the screen."""

from __future__ import annotations

from zerotop.analysis.memory.memory_view import MemoryView, MemoryViews
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.interfaces import Source
from zerotop.ui.memory.ledger_curve import ASK, ASKED, LATER, NO_GPU


class MemoryModel:
    """The views, and whether the host's memory is looked at."""

    def __init__(self, source: Source) -> None:
        self._views = MemoryViews(source.session)
        self._host: bool | None = None  # None until somebody chose

    def view(self, frame: Frame) -> MemoryView:
        """The memory at the frame's cursor, of the rank that was chosen."""
        return self._views.at(frame.view.cursor_ns, frame.rank)

    def of_host(self, view: MemoryView) -> bool:
        """Where there is no GPU it is the host's memory that matters."""
        return not view.gpus if self._host is None else self._host

    def switch(self, view: MemoryView) -> None:
        """From a GPU's memory to the host's, and back."""
        self._host = not self.of_host(view)


def can_look(frame: Frame, view: MemoryView) -> bool:
    """Whether a look through the microscope can be asked for: the job runs, and the rank has a GPU's allocator."""
    return frame.steered and view.health is not None


def hint(frame: Frame, view: MemoryView) -> str:
    """What is to be said about a look: that one is awaited, or how to get the first one."""
    if view.rank is not None and view.health is None:
        return NO_GPU
    if frame.steered and frame.asked is not None and (view.look is None or view.look.request < frame.asked):
        return ASKED
    if view.look is not None:
        return ""
    return ASK if frame.steered else LATER
