"""The panels of the Live screen: each passes its size and the frame to its drawing function."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from textual import events
from textual.message import Message

from zerotop.analysis.live_view import LiveView
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.clipboard import format_iterations
from zerotop.ui.base.findings import find_step_marks
from zerotop.ui.base.frame import Frame, Pane
from zerotop.ui.base.frame_widget import FindingChosen, FrameWidget
from zerotop.ui.base.pointed_panel import MousePanel, PointedPanel
from zerotop.ui.drawing.labels import describe_no_output
from zerotop.ui.drawing.rows import Row
from zerotop.ui.live.cpu import draw_cpu
from zerotop.ui.live.gpu import draw_gpu
from zerotop.ui.live.iteration import draw_iteration, find_step_at
from zerotop.ui.live.memory import describe_memory, draw_memory, find_memory_gpu
from zerotop.ui.live.output import count_visible_lines, draw_output
from zerotop.ui.live.pointing import describe_gpu_at, describe_rank_at, find_gpu_at, find_rank_at
from zerotop.ui.live.summary import draw_summary
from zerotop.ui.widgets.scrollable import Scrollable


class ViewPanel(PointedPanel, can_focus=True):
    """A panel that one function draws from the view. The mouse shows values, a click on a row chooses its rank."""

    @abstractmethod
    def find_ranks(self, view: LiveView, y: int) -> Sequence[int]:
        """Return the ranks that a row is about."""

    def on_click(self, event: events.Click) -> None:
        ranks = () if self.frame is None else self.find_ranks(self.frame.state_view, event.y)
        if ranks:
            self.post_message(MonitorScreen.RankChosen(min(ranks)))


class Memory(ViewPanel):
    """The memory of GPUs, or of the host."""

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        return draw_memory(frame.state_view, width, height, self.glyphs, focused=self.has_focus)

    def describe_cell(self, frame: Frame, x: int, y: int) -> str:
        return describe_memory(frame.state_view, *self.size, x, y)

    def find_ranks(self, view: LiveView, y: int) -> Sequence[int]:
        gpu = find_memory_gpu(view, self.size.height, y)
        return gpu.ranks if gpu is not None else ()


class Ranks(ViewPanel):
    """The ranks and the cores that they use."""

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        return draw_cpu(frame.state_view, width, height, self.glyphs, focused=self.has_focus)

    def describe_cell(self, frame: Frame, x: int, y: int) -> str:
        return describe_rank_at(frame.state_view, *self.size, x, y, self.glyphs)

    def find_ranks(self, view: LiveView, y: int) -> Sequence[int]:
        rank = find_rank_at(view, self.size.height, y)
        return (rank.rank,) if rank is not None else ()


class Gpus(ViewPanel):
    """The utilization of the GPUs."""

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        return draw_gpu(frame.state_view, width, height, self.glyphs, focused=self.has_focus)

    def describe_cell(self, frame: Frame, x: int, y: int) -> str:
        return describe_gpu_at(frame.state_view, *self.size, x, y, self.glyphs)

    def find_ranks(self, view: LiveView, y: int) -> Sequence[int]:
        gpu = find_gpu_at(view, self.size.height, y)
        return gpu.ranks if gpu is not None else ()


class Iteration(MousePanel, can_focus=True):
    """Time per step. The mouse shows the values of a step, a click goes to its end."""

    def cache_key(self, frame: Frame) -> tuple[object, ...]:
        # Sources return the same object until another step is finished.
        view = frame.view
        marks = find_step_marks(frame.findings)
        return view.iterations, view.loss, view.progress.total_steps, view.job.state.is_over, marks, self._pointed

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        marks, pointed = find_step_marks(frame.findings), self._pointed
        return draw_iteration(frame.view, width, height, self.glyphs, focused=self.has_focus, marks=marks, pointed=pointed)

    def find_place(self, x: int, y: int) -> int | None:
        """Return the step in a column."""
        return None if self.frame is None else find_step_at(self.frame.view, self.size.width, x)

    def on_click(self, event: events.Click) -> None:
        step = self.find_place(event.x, event.y)
        if step is not None:
            self.post_message(MonitorScreen.StepChosen(step))

    def copy_text(self) -> str:
        """Return all steps, also those that do not fit on the screen."""
        return "" if self.frame is None else format_iterations(self.frame.view.iterations)


class Summary(FrameWidget, can_focus=True):
    """The summary of a job that has ended. A click on a finding goes to it."""

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
        self.post_message(self.Scrolled(lines, self._count_lines()))

    def scroll_pages(self, pages: int) -> None:
        """Request older or newer pages, which overlap by one line."""
        self.scroll_lines(pages * max(1, self._count_lines() - 1))

    def _count_lines(self) -> int:
        pane = Pane(()) if self.frame is None else self.frame.output
        return count_visible_lines(pane, self.size.width, self.size.height)

    def scroll_rows(self, rows: int) -> None:
        self.scroll_lines(-rows)
