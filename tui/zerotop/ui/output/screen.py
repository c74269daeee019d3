"""Everything the job has printed: to be read, scrolled and searched, in step with the cursor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from zerotop.analysis.output.lines import OutputLine
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.footer import Key
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.interfaces import Source
from zerotop.ui.base.layout import Box
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import describe_no_output
from zerotop.ui.drawing.rows import Row
from zerotop.ui.output.drawing import OutputPage, SearchState, count_visible_lines, draw_lines, draw_page_rows, lines_text
from zerotop.ui.output.model import OutputView
from zerotop.ui.output.search_bar import Find
from zerotop.ui.widgets.frame_widget import FrameWidget

# The progress of a search is shown after so long.
_SEARCH_SLICE_S = 0.02


class OutputScreen(MonitorScreen):
    """What did the job say, and when."""

    NAME = "output"
    TITLE = "Output"
    HELP = "Everything the job printed, with when and in which step: scroll, search, and go to the moment of any line."
    TERMS = (
        (
            "time, step",
            "When a line was finished, since the recording's begin, and the optimizer step in progress then.\n"
            "Both are said once and again where they change.",
        ),
        (
            "▶",
            "The cursor: what is above had been printed, what is dim below came later.\n"
            "A click on a line goes to its moment.",
        ),
        (
            "▏stderr",
            "A coloured bar before a line: it came on stderr, where the two streams were recorded apart.\n"
            "Progress bars are shown as a terminal would leave them.",
        ),
        (
            "search",
            "Plain text; small letters find capitals too, capitals only themselves. Enter goes to the next line\n"
            "that has it and takes the cursor there, N to the one before, escape forgets it.",
        ),
    )

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "find", "Find", id="output.find", tooltip="Look for a text in all of the output"),
        Binding("enter", "match(1)", "Next match", id="output.next", tooltip="To the next line that has it"),
        Binding("N", "match(-1)", "Match before", id="output.before", tooltip="To the line before that has it"),
        Binding("up", "scroll_by(1)", "Line back", id="output.up", tooltip="One line back", show=False),
        Binding("down", "scroll_by(-1)", "Line on", id="output.down", tooltip="One line on", show=False),
        Binding("pageup", "page(1)", "Page back", id="output.pageup", tooltip="A page back", show=False),
        Binding("pagedown", "page(-1)", "Page on", id="output.pagedown", tooltip="A page on", show=False),
        Binding("w", "wrap", "Wrap lines", id="output.wrap", tooltip="Long lines in several rows, or cut"),
        Binding("escape", "back", "Leave the search", id="output.back", tooltip="Forget what is looked for", show=False),
    ]

    def __init__(self, glyphs: Glyphs, source: Source) -> None:
        super().__init__(glyphs, source)
        self.reading = OutputView(source.session)
        self._seeks_match = False  # the match that is being looked for is to be gone to, not only to be seen

    def build_panels(self) -> Iterable[FrameWidget]:
        yield OutputLines(self.glyphs, self.reading, id="lines")
        yield Find(self.glyphs, self.reading, id="find")

    def layout_panels(self, room: Box, frame: Frame) -> dict[str, Box]:
        if not self._is_searching or room.height < 2:
            return {"lines": room}
        last = Box(room.x, room.y + room.height - 1, room.width, 1)
        return {"lines": Box(room.x, room.y, room.width, room.height - 1), "find": last}

    def footer_keys(self, frame: Frame) -> Sequence[Key]:
        searching = self.reading.search is not None
        match = [Key("enter", "next", "screen.match(1)", 7), Key("N", "before", "screen.match(-1)", 5)]
        return (
            Key("/", "find", "screen.find", 8),
            *(match if searching else ()),
            Key("↑↓", "scroll", "screen.page(1)", 5, ("screen.page(1)", "screen.page(-1)")),
            Key("y", "copy", "app.copy", 3),
            Key("w", "wrap", "screen.wrap", 2),
        )

    def action_find(self) -> None:
        self.reading.start_typing()
        self.request_redraw()
        self.set_focus(self.query_one(Find))

    def on_find_typed(self, event: Find.Typed) -> None:
        event.stop()
        self._seeks_match = False

    def on_find_accepted(self, event: Find.Accepted) -> None:
        event.stop()
        self.reading.stop_typing()
        self.set_focus(None)
        self._seeks_match = True
        self.request_redraw(self._accept_search)

    def _accept_search(self) -> None:
        if self.reading.current_match is not None:
            self._seek_match()
        else:
            self.reading.request_match(1)

    def on_find_left(self, event: Find.Left) -> None:
        event.stop()
        self.action_back()

    def action_match(self, direction: int) -> None:
        self._seeks_match = True
        self.request_redraw(partial(self.reading.request_match, direction))

    @property
    def _is_searching(self) -> bool:
        return self.reading.typed_text is not None or self.reading.search is not None

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "back":
            return self._is_searching or bool(self.zoomed)
        return super().check_action(action, parameters)

    def action_back(self) -> None:
        if self._is_searching:
            self.set_focus(None)
            self.reading.stop_typing()
            self.request_redraw(self.reading.clear_search)
        else:
            self.action_unzoom()

    def action_scroll_by(self, lines: int) -> None:
        self.request_redraw(partial(self.reading.scroll_lines, lines))

    def action_page(self, direction: int) -> None:
        self.action_scroll_by(direction * max(1, count_visible_lines(self.query_one(OutputLines).size.height) - 1))

    def on_output_lines_scrolled(self, event: OutputLines.Scrolled) -> None:
        event.stop()
        self.action_scroll_by(event.lines)

    def on_output_lines_dragged(self, event: OutputLines.Dragged) -> None:
        event.stop()
        self.request_redraw(partial(self.reading.scroll_to_share, event.share))

    def on_output_lines_chosen(self, event: OutputLines.Chosen) -> None:
        event.stop()
        self.post_message(self.SeekRequested(event.time_ns))

    def action_wrap(self) -> None:
        self.request_redraw(self.reading.toggle_wrapping)

    def find_next_work(self) -> Callable[[], object] | None:
        return self._continue_search if self.reading.is_busy else None

    def _continue_search(self) -> None:
        if self.reading.continue_search(_SEARCH_SLICE_S) is not None and self._seeks_match:
            self._seek_match()

    def _seek_match(self) -> None:
        time_ns = self.reading.jump_to_match()
        if time_ns is not None:
            self.post_message(self.SeekRequested(time_ns))


class OutputLines(FrameWidget):
    """The lines. The mouse scrolls, and goes to the moment of a line."""

    class Scrolled(Message):
        """Older lines (positive) or newer ones are wanted."""

        def __init__(self, lines: int) -> None:
            super().__init__()
            self.lines = lines

    class Dragged(Message):
        """A share of the whole output was chosen at the right edge."""

        def __init__(self, share: float) -> None:
            super().__init__()
            self.share = share

    class Chosen(Message):
        """A line was clicked, which was printed at this time."""

        def __init__(self, time_ns: int) -> None:
            super().__init__()
            self.time_ns = time_ns

    _is_dragging = False

    def __init__(self, glyphs: Glyphs, reading: OutputView, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self.reading = reading
        self._drawn: tuple[OutputPage, SearchState] | None = None

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        self.reading.move_to(frame.view.cursor_ns, frame.output.seek_count)
        page, search = self._drawn = self.reading.build_page(count_visible_lines(height)), self.reading.describe_search()
        return draw_lines(page, search, width, height, self.glyphs, describe_no_output(frame.view.job))

    def copy_text(self) -> str:
        """The lines that are seen, each whole."""
        found: list[OutputLine] = []
        for line in self._find_visible_lines():
            if not found or line is not found[-1]:
                found.append(line)
        return lines_text(found, self.glyphs)

    def _find_visible_lines(self) -> list[OutputLine]:
        width, height = self.size
        if self._drawn is None:
            return []
        return [line for _, line in draw_page_rows(*self._drawn, width, count_visible_lines(height), self.glyphs)]

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.post_message(self.Scrolled(3))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.post_message(self.Scrolled(-3))

    def on_mouse_down(self, event: events.MouseDown) -> None:
        if event.x == self.size.width - 1:
            self._is_dragging = True
            self.capture_mouse()
            self._post_drag(event.y)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._is_dragging:
            self._post_drag(event.y)

    def on_mouse_up(self) -> None:
        self._is_dragging = False
        self.release_mouse()

    def _post_drag(self, y: int) -> None:
        room = count_visible_lines(self.size.height)
        self.post_message(self.Dragged((y - (self.size.height - room)) / max(1, room - 1)))

    def on_click(self, event: events.Click) -> None:
        lines, row = self._find_visible_lines(), event.y - (self.size.height - count_visible_lines(self.size.height))
        if event.x < self.size.width - 1 and 0 <= row < len(lines):
            self.post_message(self.Chosen(lines[row].time_ns))
