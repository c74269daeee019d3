"""The panels of all screens, and those of the live screen. Drawing functions make their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from textual import events
from textual.message import Message

from zerotop.analysis.live_view import LiveView
from zerotop.ui.base.clipboard import format_iterations
from zerotop.ui.base.findings import find_step_marks
from zerotop.ui.base.footer import draw_badge, draw_tabs, draw_transport, measure_track
from zerotop.ui.base.footer_keys import label_common_keys
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.header import draw_header, draw_notices
from zerotop.ui.base.post_mortem import draw_post_mortem
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import describe_no_output
from zerotop.ui.drawing.rows import Row
from zerotop.ui.live.iteration import draw_iteration
from zerotop.ui.live.output import count_visible_lines, draw_output
from zerotop.ui.widgets.frame_widget import CommonPanel, FrameWidget
from zerotop.ui.widgets.key_row import ClickableRow
from zerotop.ui.widgets.scrollable import Scrollable


class DrawView(Protocol):
    """A function that draws a panel from the view."""

    def __call__(self, view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]: ...


class Header(CommonPanel):
    """The job, its progress and speed, and whether the screen follows it."""

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        badge = draw_badge(frame.view, frame.moment, self.glyphs)
        return draw_header(frame.view, badge, width, height, self.glyphs)


class Notices(CommonPanel):
    """Sentences about the job and its findings, or why it failed."""

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        if frame.failure is not None:
            return draw_post_mortem(frame.failure, frame.view.cursor_ns, width, height, self.glyphs)
        return draw_notices(frame.list_notices(self.app.size.height), width, height, self.glyphs)


class ViewPanel(FrameWidget, can_focus=True):
    """A panel that one function draws from the view."""

    def __init__(self, glyphs: Glyphs, draw_view: DrawView, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self._draw_view = draw_view

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        return self._draw_view(frame.view, width, height, self.glyphs, focused=self.has_focus)


class Iteration(FrameWidget, can_focus=True):
    """Time per step."""

    def cache_key(self, frame: Frame) -> tuple[object, ...]:
        # Sources return the same object until another step is finished.
        view = frame.view
        return view.iterations, view.progress.total_steps, view.job.state.is_over, find_step_marks(frame.findings)

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        marks = find_step_marks(frame.findings)
        return draw_iteration(frame.view, width, height, self.glyphs, focused=self.has_focus, marks=marks)

    def copy_text(self) -> str:
        """Return all steps, also those that do not fit on the screen."""
        return "" if self.frame is None else format_iterations(self.frame.view.iterations)


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


class Transport(CommonPanel):
    """The cursor's position in the recording; the mouse moves it."""

    class Scrubbed(Message):
        """The mouse chose a position, as a share of the recording's length."""

        def __init__(self, share: float) -> None:
            super().__init__()
            self.share = share

    _is_dragging = False

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        return [draw_transport(frame.moment, width, self.glyphs)]

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self._is_dragging = True
        self.capture_mouse()
        self._scrub_to(event.x)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._is_dragging:
            self._scrub_to(event.x)

    def on_mouse_up(self) -> None:
        self._is_dragging = False
        self.release_mouse()

    def _scrub_to(self, x: int) -> None:
        if self.frame is None:
            return
        begin, length = measure_track(self.size.width, self.frame.moment)
        if length >= 6:
            self.post_message(self.Scrubbed(max(0.0, min(1.0, (x - begin) / (length - 1)))))


class Tabs(CommonPanel, ClickableRow):
    """The screens, and the cost of watching."""

    def __init__(self, glyphs: Glyphs, *, id: str, active: str) -> None:
        super().__init__(glyphs, id=id)
        self.active = active

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        row, places = draw_tabs(frame.tabs, self.active, frame.view.cost, frame.fps, width, self.glyphs)
        self._click_boxes = tuple(places)
        return [row]


class Keys(CommonPanel, ClickableRow):
    """The keys that work here."""

    def __init__(self, glyphs: Glyphs, *, id: str, own_labels: Callable[[Frame], Mapping[str, str]]) -> None:
        super().__init__(glyphs, id=id)
        self._own_labels = own_labels

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        labels = label_common_keys(frame.moment, len(frame.all_findings))
        return [self.draw_key_row({**labels, **self._own_labels(frame)}, width)]
