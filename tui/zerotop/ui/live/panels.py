"""The panels of the Live screen: each passes its size and the frame to its drawing function."""

from __future__ import annotations

from typing import Protocol

from textual import events
from textual.message import Message

from zerotop.analysis.live_view import LiveView
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.clipboard import format_iterations
from zerotop.ui.base.findings import find_step_marks
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.frame_widget import FindingChosen, FrameWidget
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import describe_no_output
from zerotop.ui.drawing.rows import Row
from zerotop.ui.live.cpu_gpu import find_rank_at
from zerotop.ui.live.iteration import draw_iteration, find_step_at
from zerotop.ui.live.output import count_visible_lines, draw_output
from zerotop.ui.live.summary import draw_summary
from zerotop.ui.widgets.scrollable import Scrollable


class DrawView(Protocol):
    """A function that draws a panel from the view."""

    def __call__(self, view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]: ...


class ViewPanel(FrameWidget, can_focus=True):
    """A panel that one function draws from the view."""

    def __init__(self, glyphs: Glyphs, draw_view: DrawView, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self._draw_view = draw_view

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        return self._draw_view(frame.view, width, height, self.glyphs, focused=self.has_focus)


class RankPanel(ViewPanel):
    """The ranks on Live: a click chooses one, for every screen."""

    def on_click(self, event: events.Click) -> None:
        rank = None if self.frame is None else find_rank_at(self.frame.view, self.size.height, event.y)
        if rank is not None:
            self.post_message(MonitorScreen.RankChosen(rank))


class Iteration(FrameWidget, can_focus=True):
    """Time per step. The mouse shows the values of a step, a click goes to its end."""

    _pointed_step: int | None = None

    def cache_key(self, frame: Frame) -> tuple[object, ...]:
        # Sources return the same object until another step is finished.
        view = frame.view
        marks = find_step_marks(frame.findings)
        return view.iterations, view.progress.total_steps, view.job.state.is_over, marks, self._pointed_step

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        marks = find_step_marks(frame.findings)
        pointed = self._pointed_step
        return draw_iteration(frame.view, width, height, self.glyphs, focused=self.has_focus, marks=marks, pointed=pointed)

    def _find_step(self, x: int) -> int | None:
        return None if self.frame is None else find_step_at(self.frame.view, self.size.width, x)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        self._point_at(self._find_step(event.x))

    def on_leave(self) -> None:
        self._point_at(None)

    def _point_at(self, step: int | None) -> None:
        if step != self._pointed_step:
            self._pointed_step = step
            self.request_redraw()

    def on_click(self, event: events.Click) -> None:
        step = self._find_step(event.x)
        if step is not None:
            self.post_message(MonitorScreen.StepChosen(step))

    def copy_text(self) -> str:
        """Return all steps, also those that do not fit on the screen."""
        return "" if self.frame is None else format_iterations(self.frame.view.iterations)


class Summary(FrameWidget, can_focus=True):
    """What a job that has ended did. A click on a finding goes to it."""

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        assert frame.summary is not None  # it has no place otherwise
        return draw_summary(frame.summary, frame.view, width, height, self.glyphs, focused=self.has_focus)

    def on_click(self, event: events.Click) -> None:
        findings = self.frame.summary.findings if self.frame is not None and self.frame.summary is not None else ()
        if 1 <= event.y <= len(findings):
            self.post_message(FindingChosen(findings[event.y - 1].finding))


class Output(Scrollable, FrameWidget, can_focus=True):
    """The job's own output."""

    class Scrolled(Message):
        """Older lines (positive) or newer ones were requested; ``room`` is how many lines the pane shows."""

        def __init__(self, lines: int, room: int) -> None:
            super().__init__()
            self.lines = lines
            self.room = room

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        empty_text = describe_no_output(frame.view.job)
        return draw_output(frame.output, width, height, self.glyphs, focused=self.has_focus, empty_text=empty_text)

    def scroll_lines(self, lines: int) -> None:
        """Request older lines (positive) or newer ones."""
        self.post_message(self.Scrolled(lines, count_visible_lines(self.size.height)))

    def scroll_pages(self, pages: int) -> None:
        """Request older or newer pages, which overlap by one line."""
        self.scroll_lines(pages * max(1, count_visible_lines(self.size.height) - 1))

    def scroll_rows(self, rows: int) -> None:
        self.scroll_lines(-rows)
