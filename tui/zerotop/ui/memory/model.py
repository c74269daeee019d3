"""What the memory screen is about, without the screen."""

from __future__ import annotations

from zerotop.analysis.memory.memory_view import MemoryView, MemoryViewBuilder
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.interfaces import Source
from zerotop.ui.memory.ledger_curve import NO_GPU_HINT, REPLAY_HINT, REQUEST_HINT, REQUESTED_HINT


class MemoryModel:
    """The views, and whether the host's memory is looked at."""

    def __init__(self, source: Source) -> None:
        self._views = MemoryViewBuilder(source.session)
        self.last_view: MemoryView | None = None
        self._host_chosen: bool | None = None  # None until somebody chose

    def view_at(self, frame: Frame) -> MemoryView:
        """The memory at the frame's cursor, of the rank that was chosen."""
        self.last_view = self._views.view_at(frame.view.cursor_ns, frame.rank)
        return self.last_view

    def shows_host(self, view: MemoryView) -> bool:
        """Where there is no GPU it is the host's memory that matters."""
        return not view.gpus if self._host_chosen is None else self._host_chosen

    def toggle_host(self) -> None:
        """From a GPU's memory to the host's, and back."""
        if self.last_view is not None:
            self._host_chosen = not self.shows_host(self.last_view)


def can_request_trace(frame: Frame, view: MemoryView) -> bool:
    """Whether a look through the microscope can be asked for: the job runs, and the rank has a GPU's allocator."""
    return frame.can_steer and view.health is not None


def describe_hint(frame: Frame, view: MemoryView) -> str:
    """What is to be said about a look: that one is awaited, or how to get the first one."""
    if view.rank is not None and view.health is None:
        return NO_GPU_HINT
    if (
        frame.can_steer
        and frame.trace_request is not None
        and (view.trace is None or view.trace.request < frame.trace_request)
    ):
        return REQUESTED_HINT
    if view.trace is not None:
        return ""
    return REQUEST_HINT if frame.can_steer else REPLAY_HINT
