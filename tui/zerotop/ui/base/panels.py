"""The panels of the live screen, and those of all screens: each hands its size and the frame to its drawing function."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from textual import events
from textual.message import Message

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
from zerotop.ui.live.cpu_gpu import draw_cpu, draw_gpu
from zerotop.ui.live.iteration import draw_iteration
from zerotop.ui.live.memory import draw_memory
from zerotop.ui.live.output import count_visible_lines, draw_output
from zerotop.ui.widgets.frame_widget import CommonPanel, FrameWidget
from zerotop.ui.widgets.key_row import ClickableRow
from zerotop.ui.widgets.scrollable import Scrollable


class Header(CommonPanel):
    """Who is running, how far and how fast, and whether this is now."""

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        badge = draw_badge(frame.view, frame.moment, self.glyphs)
        return draw_header(frame.view, badge, width, height, self.glyphs)


class Notices(CommonPanel):
    """Sentences about what happened."""

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        if frame.failure is not None:
            return draw_post_mortem(frame.failure, frame.view.cursor_ns, width, height, self.glyphs)
        return draw_notices(frame.list_notices(self.app.size.height), width, height, self.glyphs)


class Memory(FrameWidget, can_focus=True):
    """Memory of each GPU, or of the host."""

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        return draw_memory(frame.view, width, height, self.glyphs, focused=self.has_focus)


class Iteration(FrameWidget, can_focus=True):
    """Time per step."""

    _drawn_key: tuple[object, ...] = ()

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        iterations, total = frame.view.iterations, frame.view.progress.total_steps
        marks = find_step_marks(frame.findings)
        drawn = (iterations, total, frame.view.job.state.is_over, width, height, self.has_focus, marks)
        # A source may hand out the same steps again until another one is finished.
        if self._drawn_key and drawn[0] is self._drawn_key[0] and drawn[1:] == self._drawn_key[1:]:
            return self.drawn_rows
        self._drawn_key = drawn
        return draw_iteration(frame.view, width, height, self.glyphs, focused=self.has_focus, marks=marks)

    def copy_text(self) -> str:
        """All steps, not only those that there is room for."""
        return "" if self.frame is None else format_iterations(self.frame.view.iterations)


class Cpu(FrameWidget, can_focus=True):
    """Each rank's CPU side."""

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        return draw_cpu(frame.view, width, height, self.glyphs, focused=self.has_focus)


class Gpus(FrameWidget, can_focus=True):
    """Each GPU's utilization."""

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        return draw_gpu(frame.view, width, height, self.glyphs, focused=self.has_focus)


class Output(Scrollable, FrameWidget, can_focus=True):
    """The job's own output."""

    class Scrolled(Message):
        """Older lines (positive) or newer ones are wanted; ``room`` is how many the pane shows."""

        def __init__(self, lines: int, room: int) -> None:
            super().__init__()
            self.lines = lines
            self.room = room

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        nothing = describe_no_output(frame.view.job)
        return draw_output(frame.output, width, height, self.glyphs, focused=self.has_focus, empty_text=nothing)

    def scroll_lines(self, lines: int) -> None:
        """Asks for older lines (positive) or newer ones."""
        self.post_message(self.Scrolled(lines, count_visible_lines(self.size.height)))

    def scroll_pages(self, pages: int) -> None:
        """The same by pages, of which one line stays."""
        self.scroll_lines(pages * max(1, count_visible_lines(self.size.height) - 1))

    def scroll_rows(self, rows: int) -> None:
        self.scroll_lines(-rows)


class Transport(CommonPanel):
    """Where in the recording the screen looks; the mouse moves it."""

    class Scrubbed(Message):
        """The mouse chose a place, as a share of the recording's length."""

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
    """The screens there are, and what watching costs."""

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
