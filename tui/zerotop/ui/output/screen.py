"""The output screen: everything the job printed, to scroll and search, in step with the cursor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar

from textual import events
from textual.binding import BindingType

from zerotop.analysis.output.lines import OutputLine
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.base.bars.footer_keys import bind, in_footer
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.bindings import scroll_bindings
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.frame_widget import FrameWidget
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import describe_no_output
from zerotop.ui.drawing.layout import Box
from zerotop.ui.drawing.rows import Row
from zerotop.ui.output.drawing import OutputPage, SearchState, count_visible_lines, draw_lines, draw_page_rows, format_lines
from zerotop.ui.output.model import OutputView
from zerotop.ui.output.search_bar import Find
from zerotop.ui.widgets.scrollable import Scrollable

_SEARCH_SLICE_S = 0.02  # a search shows its progress this often


class OutputScreen(MonitorScreen):
    """Shows what the job printed, and when."""

    NAME = "output"
    TITLE = "Output"
    HELP = "Everything the job printed, with times and steps: scroll, search, and go to the time of any line."
    TERMS = (
        (
            "time, step",
            "When a line was printed, since the recording began, and the optimizer step in progress then.\n"
            "Both are shown only where they change.",
        ),
        (
            "▶",
            "The cursor: lines above it had been printed, dim lines below came later.\nClick a line to go to its time.",
        ),
        (
            "▏stderr",
            "A coloured bar marks a line on stderr, if the two streams were recorded separately.\n"
            "Progress bars are shown as they would end up on a terminal.",
        ),
        (
            "×8",
            "Eight lines that say the same, as several ranks print them, or updates of a progress bar: the last of them.\n"
            "A search shows each line that it finds.",
        ),
        (
            "search",
            "Plain text; lower case also matches upper case, upper case only itself. Enter and n move the cursor to\n"
            "the next matching line, N to the previous one, escape clears the search.",
        ),
    )

    BINDINGS: ClassVar[list[BindingType]] = [
        # With priority it is handled before the next key is: that one belongs to the search.
        bind("slash", "find", "output.find", "Find", "Search all of the output", 8, priority=True),
        bind("enter,n", "match(1)", "output.next", "Next", "Go to the next match", 7),
        bind("N", "match(-1)", "output.before", "Previous", "Go to the previous match", 5),
        *scroll_bindings("output", "scroll_by", "page", up=1, group=in_footer(5, "scroll")),
        bind("w", "wrap", "output.wrap", "Wrap", "Wrap long lines, or cut them", 2),
        bind("escape", "back", "output.back", "Clear the search", "Clear the search"),
    ]

    def __init__(self, glyphs: Glyphs, source: RecordingSource) -> None:
        super().__init__(glyphs, source)
        self.reading = OutputView(source.recording)
        self._seeks_match = False  # move the cursor to the next match, not only the view

    def build_panels(self) -> Iterable[FrameWidget]:
        yield OutputPanel(self.glyphs, self.reading, id="lines")
        yield Find(self.glyphs, self.reading, id="find")

    def layout_panels(self, room: Box, frame: Frame) -> dict[str, Box]:
        if not self._is_searching or room.height < 2:
            return {"lines": room}
        last = Box(room.x, room.y + room.height - 1, room.width, 1)
        return {"lines": Box(room.x, room.y, room.width, room.height - 1), "find": last}

    def label_keys(self, frame: Frame) -> dict[str, str]:
        searching = self.reading.search is not None
        # n has another meaning while there is a search: a footer with p alone would tell half of it.
        return {"screen.zoom": "", "time.finding.back": ""} | ({} if searching else {"output.next": "", "output.before": ""})

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
        if action == "find":  # a / in the search is a character of it
            return not isinstance(self.focused, Find)
        if action == "match":  # without a search, n goes to the next finding
            return self.reading.search is not None
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
        self.action_scroll_by(direction * max(1, count_visible_lines(self.query_one(OutputPanel).size.height) - 1))

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


class OutputPanel(Scrollable, FrameWidget):
    """The lines. The wheel scrolls, and a click on a line goes to its time."""

    _is_dragging = False

    def __init__(self, glyphs: Glyphs, reading: OutputView, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self.reading = reading
        self._drawn: tuple[OutputPage, SearchState] | None = None

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        self.reading.move_to(frame.view.cursor_ns, frame.output.seek_count)
        page, search = self._drawn = self.reading.build_page(count_visible_lines(height)), self.reading.describe_search()
        job = frame.view.job
        note = "" if job.state.is_over else job.rank_files
        return draw_lines(page, search, width, height, self.glyphs, describe_no_output(job), note)

    def copy_text(self) -> str:
        """Return the visible lines in full."""
        lines: list[OutputLine] = []
        for line in self._find_visible_lines():
            if not lines or line is not lines[-1]:
                lines.append(line)
        return format_lines(lines, self.glyphs)

    def _find_visible_lines(self) -> list[OutputLine]:
        width, height = self.size
        if self._drawn is None:
            return []
        return [line for _, line in draw_page_rows(*self._drawn, width, count_visible_lines(height), self.glyphs)]

    def scroll_rows(self, rows: int) -> None:
        self.request_redraw(partial(self.reading.scroll_lines, -rows))

    def on_mouse_down(self, event: events.MouseDown) -> None:
        if event.x == self.size.width - 1:
            self._is_dragging = True
            self.capture_mouse()
            self._drag_to(event.y)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._is_dragging:
            self._drag_to(event.y)

    def on_mouse_up(self) -> None:
        self._is_dragging = False
        self.release_mouse()

    def _drag_to(self, y: int) -> None:
        room = count_visible_lines(self.size.height)
        share = (y - (self.size.height - room)) / max(1, room - 1)
        self.request_redraw(partial(self.reading.scroll_to_share, share))

    def on_click(self, event: events.Click) -> None:
        lines, row = self._find_visible_lines(), event.y - (self.size.height - count_visible_lines(self.size.height))
        if event.x < self.size.width - 1 and 0 <= row < len(lines):
            self.post_message(MonitorScreen.SeekRequested(lines[row].time_ns))
