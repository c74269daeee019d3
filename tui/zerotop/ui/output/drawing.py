"""The output screen's drawing: lines with their time and step, search matches, and a scrollbar."""

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
BEFORE_CURSOR = 0.7  # share of a page in the past that had been printed at the cursor
_MIN_TIME_WIDTH, _MIN_STEP_WIDTH = 44, 64  # widths from which these columns fit
_FAILURE = re.compile(r"\s*(?:\[rank\d+\]:?\s*)?(?:Traceback \(most recent call last\)|[\w.]*(?:Error|Exception)\b.*:)")


@dataclass(frozen=True, slots=True)
class SearchState:
    """A search and its progress."""

    text: str
    pattern: re.Pattern[str] | None  # None without a search text
    is_typing: bool
    match_count: int = 0
    number: int | None = None  # of the current match, from 1
    searched_share: float = 1.0  # of the output
    is_searching: bool = False  # for the next match
    has_failed: bool = False  # no other match in that direction
    marks: tuple[float, ...] = ()  # positions of matches in the output, from 0 to 1


@dataclass(frozen=True, slots=True)
class OutputPage:
    """The visible part of the output."""

    lines: tuple[OutputLine, ...]
    steps: tuple[int | None, ...]  # the step in progress at each line
    begin_ns: int  # begin of the recording, from which times count
    longest_s: float  # the longest time shown, for the column's width
    follows_cursor: bool  # keep the cursor's line visible rather than the first line
    cursor_place: LinePosition | None  # the last finished line at the cursor
    match_place: LinePosition | None  # the current match
    share: float  # position of the first line in the whole output, from 0 to 1
    is_whole: bool  # the page is the whole output
    has_newer: bool  # there are lines below the page
    is_wrapped: bool


def draw_lines(
    page: OutputPage, search: SearchState, width: int, height: int, glyphs: Glyphs, empty_text: str = "", note: str = ""
) -> list[Row]:
    """Draw a title with a ``note``, the lines or ``empty_text``, and a scrollbar at the right."""
    if height <= 0 or width <= 0:
        return []
    room = count_visible_lines(height)
    rows = [row for row, _ in draw_page_rows(page, search, width, room, glyphs)]
    if not page.lines:
        rows = [((f"  {empty_text}", "muted"),)]
    shown = [fit_row(row, width - 1, glyphs) for row in (rows + [()] * room)[:room]]
    bar = _draw_scrollbar(page, search, room, glyphs)
    rows = [merge_spans((*row, end)) for row, end in zip(shown, bar, strict=True)]
    return [draw_rule(_draw_title(page, sanitize(note, glyphs)), width, glyphs), *rows] if room < height else rows


def _draw_title(page: OutputPage, note: str) -> Row:
    """Return the title, with the position if the page does not follow the cursor."""
    title = (*panel_title("Output", False), *(((f" {note}", "muted"),) if note else ()))
    if page.follows_cursor or page.is_whole or not page.lines:
        return title
    if not page.has_newer:
        return (*title, (" at the end", "title-value"))
    return (*title, (f" at {page.share * 100:.0f} %", "title-value"), (", newer lines below", "title-warn"))


@dataclass(frozen=True)
class _ColumnWidths:
    """Widths of the columns; 0 for a column that is left out."""

    time: int
    step: int
    text: int

    @classmethod
    def from_page(cls, page: OutputPage, width: int) -> _ColumnWidths:
        time = len(format_clock(page.longest_s)) + 1 if width >= _MIN_TIME_WIDTH else 0
        highest = max((step for step in page.steps if step is not None), default=None)
        step = max(4, len(str(highest))) + 1 if width >= _MIN_STEP_WIDTH and highest is not None else 0
        return cls(time, step, max(1, width - 1 - 2 - time - step))


def draw_page_rows(
    page: OutputPage, search: SearchState, width: int, room: int, glyphs: Glyphs
) -> list[tuple[Row, OutputLine]]:
    """Return at most ``room`` rows of a page, each with its line."""
    columns = _ColumnWidths.from_page(page, width)
    rows: list[tuple[Row, OutputLine]] = []
    before: tuple[str, str] = ("", "")
    for line, step in zip(page.lines, page.steps, strict=True):
        labels = (format_clock((line.time_ns - page.begin_ns) / 1e9), "" if step is None else str(step))
        # Shown only where it changes: a column of equal values is not read.
        changed = (labels[0] if labels[0] != before[0] else "", labels[1] if labels[1] != before[1] else "")
        before = labels
        rows.extend((row, line) for row in _draw_line(line, changed, page, search, columns, glyphs))
    if not page.follows_cursor:
        return rows[:room]
    # Wrapped lines may need too many rows: those around the cursor stay.
    printed = sum(not line.is_later for _, line in rows)
    later = min(len(rows) - printed, room - int(room * BEFORE_CURSOR))
    first = max(0, printed - (room - later))
    return rows[first : first + room]


def _draw_line(
    line: OutputLine, labels: tuple[str, str], page: OutputPage, search: SearchState, columns: _ColumnWidths, glyphs: Glyphs
) -> list[Row]:
    marked = (line.position is None or line.position == page.cursor_place) and (page.has_newer or page.lines[-1].is_later)
    is_match = line.position is not None and line.position == page.match_place
    rows: list[Row] = []
    for part in _draw_text(line, search, columns.text, glyphs, is_match=is_match, is_wrapped=page.is_wrapped):
        time, step = labels if not rows else ("", "")
        lead: list[Span] = [(glyphs.play if marked and not rows else " ", "accent")]
        lead.append((time.rjust(columns.time - 1) + " " if columns.time else "", "muted"))
        lead.append((step.rjust(columns.step - 1) + " " if columns.step else "", "label"))
        lead.append((glyphs.line if line.stream == _STDERR else " ", "stderr"))
        rows.append(merge_spans([*lead, *part]))
    return rows


def _draw_text(
    line: OutputLine, search: SearchState, width: int, glyphs: Glyphs, *, is_match: bool, is_wrapped: bool
) -> list[list[Span]]:
    """Return the line's text in one row, or in several if lines are wrapped."""
    text = sanitize(line.text, glyphs)
    times: list[Span] = [(f" {glyphs.times}{format_grouped(line.repeats)}", "muted")] if line.repeats > 1 else []
    width -= sum(cell_width(span[0]) for span in times)
    usual = "later" if line.is_later else "alert" if _FAILURE.match(text) else "output"
    parts = (
        [fit_text(text, width, glyphs, at_words=False)]
        if not is_wrapped or cell_width(text) <= width
        else _split_text(text, width)
    )
    rows = [_highlight_matches(part, search, usual, "match-here" if is_match else "match") for part in parts]
    return [*rows[:-1], [*rows[-1], *times]]


def _split_text(text: str, width: int) -> list[str]:
    """Split text into pieces of at most ``width`` cells."""
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
    """Draw a column for the whole output, with the matches and the page's position."""
    if page.is_whole:
        return [(" ", "text")] * height
    column: list[Span] = [(glyphs.line, "rule")] * height
    for share in search.marks:
        column[min(height - 1, int(share * height))] = (glyphs.line, "match-mark")
    column[min(height - 1, max(0, int(page.share * height)))] = (glyphs.thumb, "accent")
    return column


def draw_search(search: SearchState, width: int, glyphs: Glyphs) -> Row:
    """Draw the search bar: the text, then the outcome."""
    text = sanitize(search.text, glyphs)
    lead: Row = ((" / ", "key"), (text, "band-value"))
    if search.is_typing:
        lead = (*lead, (" ", "caret"))
    return fit_row((*lead, ("  ", "band"), *_draw_outcome(search, glyphs)), width, glyphs, "band")


def _draw_outcome(search: SearchState, glyphs: Glyphs) -> Row:
    if not search.text:
        return (("type to search: enter goes to a match, escape cancels", "band-muted"),)
    rest = "" if search.searched_share >= 1 else f", {search.searched_share * 100:.0f} % searched"
    if search.is_searching:
        return ((f"searching{glyphs.ellipsis}{rest}", "band-muted"),)
    if not search.match_count:
        return (("no matches" if not rest else f"no matches yet{rest}", "band-warn"),)
    which = f"{format_grouped(search.number)} of " if search.number else ""
    row: Row = ((f"{which}{format_grouped(search.match_count)} {pluralize(search.match_count, 'line')}{rest}", "band"),)
    if search.has_failed:
        row = (*row, ("  no more in that direction", "band-warn"))
    return row if search.is_typing else (*row, ("  enter next  N previous  esc clear", "band-muted"))


def count_visible_lines(height: int) -> int:
    """Return the rows for lines in a panel of this height."""
    return height - (height >= 3)


def format_lines(lines: Sequence[OutputLine], glyphs: Glyphs) -> str:
    """Return lines for the clipboard."""
    return "\n".join(sanitize(line.text, glyphs) for line in lines)
