"""The panels of the iteration screen."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import partial

from textual import events

from zerotop.analysis.live_view import JobState
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.frame_widget import FrameWidget
from zerotop.ui.base.pointed_panel import MousePanel
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_row
from zerotop.ui.iteration.clipboard import format_phases, format_waveform
from zerotop.ui.iteration.drawing import ShownWaveform, draw_empty, draw_waveform, find_position
from zerotop.ui.iteration.model import FoldModel
from zerotop.ui.iteration.samples import draw_samples
from zerotop.ui.iteration.table import draw_phases
from zerotop.ui.widgets.scrollable import Wheel


class _FoldPanel(FrameWidget, can_focus=True):
    """A panel that shows a folded iteration."""

    def __init__(self, glyphs: Glyphs, folding: FoldModel, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self.folding = folding

    def cache_key(self, frame: Frame) -> tuple[object, ...] | None:
        shown = self.folding.find_shown(frame)
        return None if shown is None else (shown,)

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        shown = self.folding.find_shown(frame)
        if shown is None:
            return self.draw_empty(frame, width, height)
        return self.draw_fold(shown, width, height)

    def draw_empty(self, frame: Frame, width: int, height: int) -> list[Row]:
        """Draw the panel if nothing can be folded."""
        return [fit_row((), width, self.glyphs)] * height

    @abstractmethod
    def draw_fold(self, shown: ShownWaveform, width: int, height: int) -> list[Row]:
        """Draw the fold."""


class WaveformPanel(Wheel, _FoldPanel, MousePanel):
    """The folded iteration. The mouse shows values, its wheel averages fewer iterations or more."""

    _shown: ShownWaveform | None = None  # in the last picture

    def draw_empty(self, frame: Frame, width: int, height: int) -> list[Row]:
        return draw_empty(_describe_missing(self.folding, frame), width, height, self.glyphs, focused=self.has_focus)

    def cache_key(self, frame: Frame) -> tuple[object, ...] | None:
        key = super().cache_key(frame)
        return None if key is None else (*key, self._pointed)

    def find_place(self, x: int, y: int) -> float | None:
        """Return the position in the iteration in seconds."""
        return None if self._shown is None else find_position(self._shown, self.size.width, x)

    def turn_wheel(self, event: events.MouseEvent, direction: int) -> None:
        event.stop()
        self.request_redraw(partial(self.folding.change_count, direction))

    def draw_fold(self, shown: ShownWaveform, width: int, height: int) -> list[Row]:
        self._shown = shown = replace(shown, pointed_s=self._pointed)
        return draw_waveform(shown, width, height, self.glyphs, self.folding.scales, focused=self.has_focus)

    def copy_text(self) -> str:
        shown = self.folding.find_shown(self.frame) if self.frame is not None else None
        return format_waveform(shown.fold) if shown is not None else ""


class PhaseTable(_FoldPanel):
    def draw_fold(self, shown: ShownWaveform, width: int, height: int) -> list[Row]:
        waits, focused = shown.launches is not None, self.has_focus
        return draw_phases(shown.fold, shown.pinned, width, height, self.glyphs, focused=focused, waits_for_launches=waits)

    def copy_text(self) -> str:
        """Return all rows, including those that do not fit."""
        shown = self.folding.find_shown(self.frame) if self.frame is not None else None
        return format_phases(shown.fold, shown.pinned) if shown is not None else ""


class SampleTable(_FoldPanel):
    """The samples behind the curves."""

    def draw_fold(self, shown: ShownWaveform, width: int, height: int) -> list[Row]:
        return draw_samples(shown.fold, width, height, self.glyphs, focused=self.has_focus)


def _describe_missing(folding: FoldModel, frame: Frame) -> tuple[tuple[str, str], ...]:
    """Say why nothing can be folded, and how to change that."""
    if folding.is_busy:
        return (("Adding up the iterations …", "muted"),)
    is_over = frame.view.job.state.is_over
    if folding.waveforms.has_steps(frame.view.cursor_ns):
        if is_over:
            return (("Too few iterations were recorded to show one.", "text"),)
        return (
            ("Waiting for the first iterations.", "text"),
            ("They will show GPU, CPU, power and memory in each phase.", "muted"),
        )
    pid = next((rank.pid for rank in frame.view.ranks if rank.alive), None)
    # While a job starts, its processes are there before their engines are.
    missing = next((notice for notice in frame.view.job.notices if notice.startswith("The probe was not loaded")), "")
    if not missing and not frame.view.ranks and is_over:
        return (("No rank trained: there is no iteration to show.", "text"),)
    if not missing and (not frame.view.ranks or frame.view.job.state is JobState.STARTING):
        return (
            ("Waiting for the training to begin.", "text"),
            ("Iterations appear when the first ones are finished.", "muted"),
        )
    command = f"zerotop attach {pid} --enter" if pid is not None else "zerotop run -- COMMAND"
    return (
        (missing or "Phases and iterations are recorded inside the ranks, and the probe is not in them.", "text"),
        (f"To see its phases: {command}", "value"),
        ("Jobs started with zerotop run have the probe from the start.", "muted"),
    )
