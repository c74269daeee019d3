"""The state of the memory screen, without a terminal."""

from __future__ import annotations

from zerotop.analysis.sweeps.baseline import Baseline, NoBaselineError, read_baseline
from zerotop.analysis.views.memory_view import MemoryView, read_memory_view
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.base.frame import Frame
from zerotop.ui.memory.ledger_curve import NO_GPU_HINT, REPLAY_HINT, REQUEST_HINT, REQUESTED_HINT


class MemoryModel:
    """The memory views, and whether to show the host's memory or a GPU's."""

    def __init__(self, source: RecordingSource) -> None:
        self._source = source
        self.last_view: MemoryView | None = None
        self._host_chosen: bool | None = None  # None until the user chooses

    def view_at(self, frame: Frame) -> MemoryView:
        """Return the memory at the frame's cursor, for the chosen rank."""
        at, last = self._source.recording.at(frame.view.cursor_ns), self._source.last_step_end
        self.last_view = read_memory_view(at, frame.rank, last=last, is_over=frame.training is not None)
        return self.last_view

    def read_baseline(self) -> Baseline | str:
        """Return what the recording measured of its last setting, or why what-if cannot start from it."""
        try:
            return read_baseline(self._source.recording)
        except NoBaselineError as error:
            return f"{error}."

    def shows_host(self, view: MemoryView) -> bool:
        """Whether to show the host's memory; by default only without GPUs."""
        return not view.gpus if self._host_chosen is None else self._host_chosen

    def toggle_host(self) -> None:
        """Switch between the GPU's memory and the host's."""
        if self.last_view is not None:
            self._host_chosen = not self.shows_host(self.last_view)


def can_request_trace(frame: Frame, view: MemoryView) -> bool:
    """Whether an allocation trace can be requested: the job runs, and the rank uses a GPU."""
    return frame.can_control and view.health is not None


def describe_hint(frame: Frame, view: MemoryView) -> str:
    """Return a sentence about the trace: it is being awaited, or how to get the first one."""
    if view.rank is not None and view.health is None:
        return NO_GPU_HINT
    if (
        frame.can_control
        and frame.trace_request is not None
        and (view.trace is None or view.trace.request < frame.trace_request)
    ):
        return REQUESTED_HINT
    if view.trace is not None:
        return ""
    return REQUEST_HINT if frame.can_control else REPLAY_HINT
