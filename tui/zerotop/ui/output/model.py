"""The state of the output screen, without a terminal: the visible lines and the search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zerotop.analysis.output.lines import LinePosition, OutputBuffer, OutputLine, StepClock
from zerotop.analysis.output.search import OutputSearch, fold_repeats
from zerotop.recording.reader import Recording
from zerotop.ui.output.drawing import BEFORE_CURSOR, OutputPage, SearchState

_MOST_LINES = 4096  # that a page is folded from


class OutputView:
    """Follows the cursor until the user scrolls, and again after the next seek."""

    def __init__(self, recording: Recording) -> None:
        self.buffer = OutputBuffer(recording)
        self.is_wrapped = False
        self.typed_text: str | None = None  # of the open search bar, else None; set by the app's thread
        self.current_match: LinePosition | None = None  # the match the user went to
        self.search: OutputSearch | None = None
        self._recording = recording
        self._step_clock = StepClock(recording)
        self._top_line: LinePosition | None = None  # the first visible line; None follows the cursor
        self._seek_count = 0
        self._visible_lines = 1
        self._wanted_match: tuple[LinePosition, int] | None = None  # (begin, direction) of the search for the next match
        self._search_failed = False
        self._is_jumping = False

    def toggle_wrapping(self) -> None:
        """Wrap long lines, or cut them."""
        self.is_wrapped = not self.is_wrapped

    def move_to(self, cursor_ns: int, seek_count: int) -> None:
        """Move to this cursor. ``seek_count`` is how often the user went to another moment."""
        if seek_count != self._seek_count:
            self._seek_count, self._top_line = seek_count, None
            if not self._is_jumping:
                self.current_match = None
            self._is_jumping = False
        self.buffer.refresh_at(cursor_ns)

    # The visible lines

    def build_page(self, room: int) -> OutputPage:
        """Build a page of at most ``room`` lines."""
        self._visible_lines = max(1, room)
        buffer = self.buffer
        top = self._find_top()
        lines = self._read_page(top)
        last = next((line.position for line in reversed(lines) if line.position is not None), None)
        below = buffer.move_position(last, 1) if last is not None else top
        newer = buffer.move_position(below, 1) != below
        begin_ns = self._recording.begin_ns
        return OutputPage(
            lines=lines,
            steps=tuple(self._step_clock.step_at(line.time_ns) for line in lines),
            begin_ns=begin_ns,
            longest_s=max(0, max(buffer.cursor_ns, *(line.time_ns for line in lines), begin_ns) - begin_ns) / 1e9,
            follows_cursor=self._top_line is None,
            cursor_place=None if buffer.unfinished_count else buffer.move_position(buffer.cursor, -1),
            match_place=self.current_match,
            share=1.0 if not newer and self._top_line is None else buffer.measure_share(top),
            is_whole=buffer.move_position(top, -1) == top and not newer,
            has_newer=newer,
            is_wrapped=self.is_wrapped,
        )

    def _find_top(self) -> LinePosition:
        """Return the first visible line. In the past, some later lines are visible too."""
        if self._top_line is not None:
            return self._top_line
        buffer = self.buffer
        most = self._visible_lines - max(1, int(self._visible_lines * BEFORE_CURSOR))
        later = sum(1 for _, _ in zip(range(most), buffer.iter_lines(buffer.cursor), strict=False))
        return self._fill_page(buffer.move_position(buffer.cursor, -(self._visible_lines - later - buffer.unfinished_count)))

    def _read_page(self, top: LinePosition) -> tuple[OutputLine, ...]:
        """Return the lines of a page, one of those that repeat it."""
        count = self._visible_lines
        while True:
            lines = self.buffer.read_lines(top, count)
            folded = self._fold(lines)
            if len(folded) > self._visible_lines or len(lines) < count or count >= _MOST_LINES:
                return tuple(folded[: self._visible_lines])
            count *= 2

    def _fill_page(self, top: LinePosition) -> LinePosition:
        """Return an earlier first line where repeated lines leave room on the last page, which begins at ``top``."""
        count = self._visible_lines
        while count < _MOST_LINES:
            room = self._visible_lines - len(self._fold(self.buffer.read_lines(top, count)))
            earlier = self.buffer.move_position(top, -room)
            if room <= 0 or earlier == top:
                break
            top, count = earlier, count + room
        return top

    def _fold(self, lines: Sequence[OutputLine]) -> list[OutputLine]:
        return fold_repeats(lines, self.search.pattern if self.search is not None else None)

    def scroll_lines(self, lines: int) -> None:
        """Scroll to older lines (positive) or newer ones, as far as there are any."""
        before = self._find_top()
        top = min(self.buffer.move_position(before, -lines), self._find_last_top())
        if top == before:
            return
        self._top_line = None
        if top != self._find_top():
            self._top_line = top

    def _find_last_top(self) -> LinePosition:
        """Return the first visible line when the last line is visible."""
        buffer = self.buffer
        last = LinePosition(buffer.blocks.sealed_count, len(buffer.blocks.finished_lines(buffer.blocks.sealed_count).texts))
        return self._fill_page(buffer.move_position(last, -(self._visible_lines - buffer.unfinished_count)))

    def scroll_to_share(self, share: float) -> None:
        """Scroll to a share of the whole output."""
        self._top_line = min(self.buffer.position_at_share(share), self._find_last_top())

    # The search

    def start_typing(self) -> None:
        """Open the search bar."""
        self.typed_text = self.search.text if self.search is not None else ""

    def type_text(self, text: str) -> None:
        """Search for the text typed so far, from the first visible line on."""
        top = self._find_top()
        self._set_search(text)
        if self.search is not None:
            self._wanted_match = (top, 1)

    def _set_search(self, text: str) -> None:
        self.search = OutputSearch(self.buffer, text) if text else None
        self.current_match, self._wanted_match, self._search_failed = None, None, False

    def stop_typing(self) -> None:
        """Close the search bar and keep the search."""
        self.typed_text = None

    def clear_search(self) -> None:
        self._set_search("")

    def request_match(self, direction: int) -> None:
        """Go to the next match (1) or the previous one (-1) as soon as it is found."""
        if self.search is None:
            return
        begin = (
            self.current_match
            if self.current_match is not None
            else self.buffer.cursor
            if self._top_line is None
            else self._top_line
        )
        self._search_failed = False
        self._wanted_match = (
            self.buffer.move_position(begin, 1) if direction > 0 and self.current_match is not None else begin,
            direction,
        )

    def jump_to_match(self) -> int | None:
        """Return the time at which the current match was printed; the caller seeks to it."""
        self._is_jumping = self.current_match is not None
        return None if self.current_match is None else self.buffer.find_time(self.current_match)

    @property
    def is_busy(self) -> bool:
        """Whether the search is unfinished."""
        return self.search is not None and (self._wanted_match is not None or not self.search.is_done)

    def continue_search(self, budget_s: float) -> LinePosition | None:
        """Search for about ``budget_s`` seconds. Returns the requested match once it is found."""
        if self.search is None:
            return None
        if self._wanted_match is None:
            self.search.continue_search(budget_s)
            return None
        place, direction = self._wanted_match
        match, rest = self.search.find_nearest(place, direction, budget_s)
        self._wanted_match = None if rest is None else (rest, direction)
        if match is not None:
            self.current_match = match
            self._scroll_to_line(match)
        else:
            self._search_failed = rest is None
        return match

    def _scroll_to_line(self, place: LinePosition) -> None:
        """Scroll until a line is visible."""
        top = self._find_top()
        if not top <= place < self.buffer.move_position(top, self._visible_lines - self.buffer.unfinished_count):
            self._top_line = self.buffer.move_position(place, -int(self._visible_lines * BEFORE_CURSOR))

    def describe_search(self) -> SearchState:
        """Return the search and its progress."""
        search = self.search
        if search is None:
            return SearchState(self.typed_text or "", None, self.typed_text is not None)
        state = SearchState(
            text=self.typed_text if self.typed_text is not None else search.text,
            pattern=search.pattern,
            is_typing=self.typed_text is not None,
            match_count=search.match_count,
            searched_share=search.searched_share,
            is_searching=self._wanted_match is not None,
            has_failed=self._search_failed,
            marks=search.match_shares(),
        )
        return state if self.current_match is None else replace(state, number=search.number_match(self.current_match))
