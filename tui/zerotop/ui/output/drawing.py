"""The output screen: lines with when they were printed, in which step, and where a text was found in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from zerotop.analysis.formatting import pluralize
from zerotop.analysis.output.lines import LinePosition, OutputLine
from zerotop.ui.drawing.formatting import format_clock, format_grouped
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, fit_row, merge_spans
from zerotop.ui.drawing.table import draw_rule, panel_title
from zerotop.ui.drawing.text import cell_width, fit_text, sanitize

_STDERR = 2
BEFORE_CURSOR = 0.7  # of what is seen in the past, so much had been printed at the cursor
_MIN_TIME_WIDTH, _MIN_STEP_WIDTH = 44, 64  # widths from which there is room for these columns
_FAILURE = re.compile(r"\s*(?:\[rank\d+\]:?\s*)?(?:Traceback \(most recent call last\)|[\w.]*(?:Error|Exception)\b.*:)")


@dataclass(frozen=True, slots=True)
class SearchState:
    """What is searched for, and how far that is."""

    text: str
    pattern: re.Pattern[str] | None  # None while nothing is
    is_typing: bool
    match_count: int = 0
    number: int | None = None  # which of them is the one gone to, from 1
    searched_share: float = 1.0  # share of the output
    is_searching: bool = False  # for the next one
    has_failed: bool = False  # there is no other in that direction
    marks: tuple[float, ...] = ()  # where in the output some of them are, from 0 to 1


@dataclass(frozen=True, slots=True)
class OutputPage:
    """What is seen of the output."""

    lines: tuple[OutputLine, ...]
    steps: tuple[int | None, ...]  # the step each was printed in
    begin_ns: int  # of the recording: times are since then
    longest_s: float  # the longest time there is, for the column's width
    follows_cursor: bool  # the cursor's line is to be seen, rather than the first of them
    cursor_place: LinePosition | None  # the last line that had been finished at the cursor
    match_place: LinePosition | None  # the match gone to
    share: float  # where in the whole output the first of them is, from 0 to 1
    is_whole: bool  # there are no others
    has_newer: bool  # lines lie below what is seen
    is_wrapped: bool


def draw_lines(
    page: OutputPage, search: SearchState, width: int, height: int, glyphs: Glyphs, empty_text: str = ""
) -> list[Row]:
    """A title, then the lines, or ``nothing`` where there are none; at the right where in the whole output they are."""
    if height <= 0 or width <= 0:
        return []
    room = count_visible_lines(height)
    rows = [row for row, _ in draw_page_rows(page, search, width, room, glyphs)]
    if not page.lines:
        rows = [((f"  {empty_text}", "muted"),)]
    shown = [fit_row(row, width - 1, glyphs) for row in (rows + [()] * room)[:room]]
    bar = _draw_scrollbar(page, search, room, glyphs)
    rows = [merge_spans((*row, end)) for row, end in zip(shown, bar, strict=True)]
    return [draw_rule(_draw_title(page), width, glyphs), *rows] if room < height else rows


def _draw_title(page: OutputPage) -> Row:
    """Says where it is, where that is not at the cursor."""
    title = panel_title("Output", False)
    if page.follows_cursor or page.is_whole or not page.lines:
        return title
    if not page.has_newer:
        return (*title, (" at its end", "title-value"))
    return (*title, (f" at {page.share * 100:.0f} %", "title-value"), (", newer lines below", "title-warn"))


@dataclass(frozen=True)
class _ColumnWidths:
    """Widths of what is before the text, 0 where left out, and of the text."""

    time: int
    step: int
    text: int

    @classmethod
    def from_page(cls, page: OutputPage, width: int, glyphs: Glyphs) -> _ColumnWidths:
        time = len(format_clock(page.longest_s)) + 1 if width >= _MIN_TIME_WIDTH else 0
        highest = max((step for step in page.steps if step is not None), default=None)
        step = max(4, len(str(highest))) + 1 if width >= _MIN_STEP_WIDTH and highest is not None else 0
        return cls(time, step, max(1, width - 1 - 2 - time - step))


def draw_page_rows(
    page: OutputPage, search: SearchState, width: int, room: int, glyphs: Glyphs
) -> list[tuple[Row, OutputLine]]:
    """The rows of a page, at most ``room``, and of which line each is."""
    columns = _ColumnWidths.from_page(page, width, glyphs)
    rows: list[tuple[Row, OutputLine]] = []
    before: tuple[str, str] = ("", "")
    for line, step in zip(page.lines, page.steps, strict=True):
        told = (format_clock((line.time_ns - page.begin_ns) / 1e9), "" if step is None else str(step))
        # Said once, and again where it changes: a column of the same is not read.
        said = (told[0] if told[0] != before[0] else "", told[1] if told[1] != before[1] else "")
        before = told
        rows.extend((row, line) for row in _draw_line(line, said, page, search, columns, glyphs))
    if not page.follows_cursor:
        return rows[:room]
    # Lines that take several rows may be too many: those around the cursor stay.
    printed = sum(not line.is_later for _, line in rows)
    later = min(len(rows) - printed, room - int(room * BEFORE_CURSOR))
    first = max(0, printed - (room - later))
    return rows[first : first + room]


def _draw_line(
    line: OutputLine, labels: tuple[str, str], page: OutputPage, search: SearchState, columns: _ColumnWidths, glyphs: Glyphs
) -> list[Row]:
    marked = (line.position is None or line.position == page.cursor_place) and (page.has_newer or page.lines[-1].is_later)
    here = line.position is not None and line.position == page.match_place
    rows: list[Row] = []
    for part in _draw_text(line, search, columns.text, glyphs, is_match=here, is_wrapped=page.is_wrapped):
        time, step = labels if not rows else ("", "")
        lead: list[Span] = [(glyphs.play if marked and not rows else " ", "accent")]
        lead.append((time.rjust(columns.time - 1) + " " if columns.time else "", "muted"))
        lead.append((step.rjust(columns.step - 1) + " " if columns.step else "", "label"))
        lead.append((_stream_mark(line, glyphs), "stderr"))
        rows.append(merge_spans([*lead, *part]))
    return rows


def _stream_mark(line: OutputLine, glyphs: Glyphs) -> str:
    return glyphs.line if line.stream == _STDERR else " "


def _draw_text(
    line: OutputLine, search: SearchState, width: int, glyphs: Glyphs, *, is_match: bool, is_wrapped: bool
) -> list[list[Span]]:
    """The line's text in one row, or in as many as it takes."""
    text = sanitize(line.text, glyphs)
    usual = "later" if line.is_later else "alert" if _FAILURE.match(text) else "output"
    parts = (
        [fit_text(text, width, glyphs, at_words=False)]
        if not is_wrapped or cell_width(text) <= width
        else _split_text(text, width)
    )
    return [_highlight_matches(part, search, usual, "match-here" if is_match else "match") for part in parts]


def _split_text(text: str, width: int) -> list[str]:
    """The text in pieces of at most ``width`` cells."""
    if text.isascii():
        return [text[at : at + width] for at in range(0, len(text), width)]
    pieces, room = [""], width
    for character in text:
        size = cell_width(character)
        if size > room:
            pieces.append("")
            room = width
        pieces[-1] += character
        room -= size
    return pieces


def _highlight_matches(text: str, search: SearchState, style: str, match_style: str) -> list[Span]:
    if search.pattern is None:
        return [(text, style)]
    spans: list[Span] = []
    at = 0
    for match in search.pattern.finditer(text):
        spans += [(text[at : match.start()], style), (match.group(), match_style)]
        at = match.end()
    return [*spans, (text[at:], style)]


def _draw_scrollbar(page: OutputPage, search: SearchState, height: int, glyphs: Glyphs) -> list[Span]:
    """A column that stands for the whole output: where matches are, and where one is."""
    if page.is_whole:
        return [(" ", "text")] * height
    column: list[Span] = [(glyphs.line, "rule")] * height
    for share in search.marks:
        column[min(height - 1, int(share * height))] = (glyphs.line, "match-mark")
    column[min(height - 1, max(0, int(page.share * height)))] = (glyphs.thumb, "accent")
    return column


def draw_search(search: SearchState, width: int, glyphs: Glyphs) -> Row:
    """The row in which one types what is looked for; then what became of it."""
    text = sanitize(search.text, glyphs)
    lead: Row = ((" / ", "key"), (text, "band-value"))
    if search.is_typing:
        lead = (*lead, (" ", "caret"))
    return fit_row((*lead, ("  ", "band"), *_draw_outcome(search, glyphs)), width, glyphs, "band")


def _draw_outcome(search: SearchState, glyphs: Glyphs) -> Row:
    if not search.text:
        return (("what to look for: enter goes there, escape leaves", "band-muted"),)
    rest = "" if search.searched_share >= 1 else f", {search.searched_share * 100:.0f} % searched"
    if search.is_searching:
        return ((f"looking for the next one{glyphs.ellipsis}{rest}", "band-muted"),)
    if not search.match_count:
        return (("not found" if not rest else f"not found yet{rest}", "band-warn"),)
    which = f"{format_grouped(search.number)} of " if search.number else ""
    said: Row = ((f"{which}{format_grouped(search.match_count)} {pluralize(search.match_count, 'line')}{rest}", "band"),)
    if search.has_failed:
        said = (*said, ("  no other in that direction", "band-warn"))
    return said if search.is_typing else (*said, ("  enter next  N before  esc leave", "band-muted"))


def count_visible_lines(height: int) -> int:
    """How many rows of lines there are in a panel of this height."""
    return height - (height >= 3)


def lines_text(lines: Sequence[OutputLine], glyphs: Glyphs) -> str:
    """Lines as they are copied."""
    return "\n".join(sanitize(line.text, glyphs) for line in lines)
