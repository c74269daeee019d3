"""The output screen: lines with when they were printed, in which step, and where a text was found in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from zerotop.analysis.formatting import called
from zerotop.analysis.output.lines import Line, Place
from zerotop.ui.drawing.formatting import clock, grouped
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, filled, merged
from zerotop.ui.drawing.table import rule
from zerotop.ui.drawing.text import cells, fit, literal
from zerotop.ui.live.memory import panel_title

_STDERR = 2
BEFORE_CURSOR = 0.7  # of what is seen in the past, so much had been printed at the cursor
_TIMED_FROM, _STEPPED_FROM = 44, 64  # widths from which there is room for these columns
_FAILURE = re.compile(r"\s*(?:\[rank\d+\]:?\s*)?(?:Traceback \(most recent call last\)|[\w.]*(?:Error|Exception)\b.*:)")


@dataclass(frozen=True, slots=True)
class Found:
    """What is searched for, and how far that is."""

    text: str
    pattern: re.Pattern[str] | None  # None while nothing is
    typing: bool
    count: int = 0
    number: int | None = None  # which of them is the one gone to, from 1
    searched: float = 1.0  # share of the output
    looking: bool = False  # for the next one
    failed: bool = False  # there is no other in that direction
    marks: tuple[float, ...] = ()  # where in the output some of them are, from 0 to 1


@dataclass(frozen=True, slots=True)
class Page:
    """What is seen of the output."""

    lines: tuple[Line, ...]
    steps: tuple[int | None, ...]  # the step each was printed in
    begin_ns: int  # of the recording: times are since then
    longest_s: float  # the longest time there is, for the column's width
    follows: bool  # the cursor's line is to be seen, rather than the first of them
    marked: Place | None  # the last line that had been finished at the cursor
    here: Place | None  # the match gone to
    share: float  # where in the whole output the first of them is, from 0 to 1
    whole: bool  # there are no others
    newer: bool  # lines lie below what is seen
    wrapped: bool


def draw_lines(page: Page, found: Found, width: int, height: int, glyphs: Glyphs, nothing: str = "") -> list[Row]:
    """A title, then the lines, or ``nothing`` where there are none; at the right where in the whole output they are."""
    if height <= 0 or width <= 0:
        return []
    room = lines_seen(height)
    rows = [row for row, _ in laid_out(page, found, width, room, glyphs)]
    if not page.lines:
        rows = [((f"  {nothing}", "muted"),)]
    shown = [filled(row, width - 1, glyphs) for row in (rows + [()] * room)[:room]]
    bar = _bar(page, found, room, glyphs)
    rows = [merged((*row, end)) for row, end in zip(shown, bar, strict=True)]
    return [rule(_title(page), width, glyphs), *rows] if room < height else rows


def _title(page: Page) -> Row:
    """Says where it is, where that is not at the cursor."""
    title = panel_title("Output", False)
    if page.follows or page.whole or not page.lines:
        return title
    if not page.newer:
        return (*title, (" at its end", "title-value"))
    return (*title, (f" at {page.share * 100:.0f} %", "title-value"), (", newer lines below", "title-warn"))


@dataclass(frozen=True)
class _Columns:
    """Widths of what is before the text, 0 where left out, and of the text."""

    time: int
    step: int
    text: int

    @classmethod
    def of(cls, page: Page, width: int, glyphs: Glyphs) -> _Columns:
        time = len(clock(page.longest_s)) + 1 if width >= _TIMED_FROM else 0
        highest = max((step for step in page.steps if step is not None), default=None)
        step = max(4, len(str(highest))) + 1 if width >= _STEPPED_FROM and highest is not None else 0
        return cls(time, step, max(1, width - 1 - 2 - time - step))


def laid_out(page: Page, found: Found, width: int, room: int, glyphs: Glyphs) -> list[tuple[Row, Line]]:
    """The rows of a page, at most ``room``, and of which line each is."""
    columns = _Columns.of(page, width, glyphs)
    rows: list[tuple[Row, Line]] = []
    before: tuple[str, str] = ("", "")
    for line, step in zip(page.lines, page.steps, strict=True):
        told = (clock((line.time_ns - page.begin_ns) / 1e9), "" if step is None else str(step))
        # Said once, and again where it changes: a column of the same is not read.
        said = (told[0] if told[0] != before[0] else "", told[1] if told[1] != before[1] else "")
        before = told
        rows.extend((row, line) for row in _rows_of(line, said, page, found, columns, glyphs))
    if not page.follows:
        return rows[:room]
    # Lines that take several rows may be too many: those around the cursor stay.
    printed = sum(not line.later for _, line in rows)
    later = min(len(rows) - printed, room - int(room * BEFORE_CURSOR))
    first = max(0, printed - (room - later))
    return rows[first : first + room]


def _rows_of(line: Line, said: tuple[str, str], page: Page, found: Found, columns: _Columns, glyphs: Glyphs) -> list[Row]:
    marked = (line.place is None or line.place == page.marked) and (page.newer or page.lines[-1].later)
    here = line.place is not None and line.place == page.here
    rows: list[Row] = []
    for part in _text(line, found, columns.text, glyphs, here=here, wrapped=page.wrapped):
        time, step = said if not rows else ("", "")
        lead: list[Span] = [(glyphs.play if marked and not rows else " ", "accent")]
        lead.append((time.rjust(columns.time - 1) + " " if columns.time else "", "muted"))
        lead.append((step.rjust(columns.step - 1) + " " if columns.step else "", "label"))
        lead.append((_stream_mark(line, glyphs), "stderr"))
        rows.append(merged([*lead, *part]))
    return rows


def _stream_mark(line: Line, glyphs: Glyphs) -> str:
    return glyphs.line if line.stream == _STDERR else " "


def _text(line: Line, found: Found, width: int, glyphs: Glyphs, *, here: bool, wrapped: bool) -> list[list[Span]]:
    """The line's text in one row, or in as many as it takes."""
    text = literal(line.text, glyphs)
    usual = "later" if line.later else "alert" if _FAILURE.match(text) else "output"
    parts = [fit(text, width, glyphs, words=False)] if not wrapped or cells(text) <= width else _pieces(text, width)
    return [_highlighted(part, found, usual, "match-here" if here else "match") for part in parts]


def _pieces(text: str, width: int) -> list[str]:
    """The text in pieces of at most ``width`` cells."""
    if text.isascii():
        return [text[at : at + width] for at in range(0, len(text), width)]
    pieces, room = [""], width
    for character in text:
        size = cells(character)
        if size > room:
            pieces.append("")
            room = width
        pieces[-1] += character
        room -= size
    return pieces


def _highlighted(text: str, found: Found, usual: str, match_style: str) -> list[Span]:
    if found.pattern is None:
        return [(text, usual)]
    spans: list[Span] = []
    at = 0
    for match in found.pattern.finditer(text):
        spans += [(text[at : match.start()], usual), (match.group(), match_style)]
        at = match.end()
    return [*spans, (text[at:], usual)]


def _bar(page: Page, found: Found, height: int, glyphs: Glyphs) -> list[Span]:
    """A column that stands for the whole output: where matches are, and where one is."""
    if page.whole:
        return [(" ", "text")] * height
    column: list[Span] = [(glyphs.line, "rule")] * height
    for share in found.marks:
        column[min(height - 1, int(share * height))] = (glyphs.line, "match-mark")
    column[min(height - 1, max(0, int(page.share * height)))] = (glyphs.thumb, "accent")
    return column


def draw_find(found: Found, width: int, glyphs: Glyphs) -> Row:
    """The row in which one types what is looked for; then what became of it."""
    text = literal(found.text, glyphs)
    lead: Row = ((" / ", "key"), (text, "band-value"))
    if found.typing:
        lead = (*lead, (" ", "caret"))
    return filled((*lead, ("  ", "band"), *_outcome(found, glyphs)), width, glyphs, "band")


def _outcome(found: Found, glyphs: Glyphs) -> Row:
    if not found.text:
        return (("what to look for: enter goes there, escape leaves", "band-muted"),)
    rest = "" if found.searched >= 1 else f", {found.searched * 100:.0f} % searched"
    if found.looking:
        return ((f"looking for the next one{glyphs.ellipsis}{rest}", "band-muted"),)
    if not found.count:
        return (("not found" if not rest else f"not found yet{rest}", "band-warn"),)
    which = f"{grouped(found.number)} of " if found.number else ""
    said: Row = ((f"{which}{grouped(found.count)} {called(found.count, 'line')}{rest}", "band"),)
    if found.failed:
        said = (*said, ("  no other in that direction", "band-warn"))
    return said if found.typing else (*said, ("  enter next  N before  esc leave", "band-muted"))


def lines_seen(height: int) -> int:
    """How many rows of lines there are in a panel of this height."""
    return height - (height >= 3)


def plain_text(lines: Sequence[Line], glyphs: Glyphs) -> str:
    """Lines as they are copied."""
    return "\n".join(literal(line.text, glyphs) for line in lines)
