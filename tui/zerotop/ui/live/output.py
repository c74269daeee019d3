"""The job's own output."""

from __future__ import annotations

from itertools import zip_longest

from zerotop.ui.base.frame import Pane
from zerotop.ui.drawing.formatting import format_grouped
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_height, fit_row
from zerotop.ui.drawing.table import draw_rule, panel_title
from zerotop.ui.drawing.text import cell_width, fit_text, sanitize

_TWO_COLUMNS_FROM = 150
_LAST_LINES = 200  # that fit into half of the width, so that a single long one does not change the columns twice


def draw_output(
    pane: Pane, width: int, height: int, glyphs: Glyphs, *, focused: bool = False, empty_text: str = ""
) -> list[Row]:
    """Draw the pane's last visible lines, or ``empty_text``; with a title in three rows or more.

    Short lines continue at the top of a second column, where there are two.
    """
    if height <= 0:
        return []
    lines, room = pane.lines, count_visible_lines(pane, width, height)
    has_title = height > _count_rows(height)
    end = max(min(room, len(lines)), len(lines) - pane.lines_below)
    shown = [sanitize(line, glyphs) for line in lines[max(0, end - room) : end]]
    rows: list[Row] = []
    if has_title:
        rows.append(draw_rule((*panel_title("Output", focused), *_draw_position(pane, end, end <= room)), width, glyphs))
    lead = "" if has_title else f"{glyphs.prompt} "
    column = width if room == _count_rows(height) else _measure_column(width)
    for left, right in zip_longest(shown[: _count_rows(height)], shown[_count_rows(height) :]):
        line = fit_text(left, column - len(lead), glyphs, at_words=False)
        second: Row = ()
        if right is not None:
            between = " " * (column - cell_width(line)) + f" {glyphs.line} "
            second = (between, "muted"), (fit_text(right, column, glyphs, at_words=False), "output")
        rows.append(fit_row(((lead, "muted"), (line, "output"), *second), width, glyphs))
    if not lines:
        rows.append(fit_row(((f"  {empty_text}" if has_title else "", "muted"),), width, glyphs))
    return fit_height(rows, width, height, glyphs)


def count_visible_lines(pane: Pane, width: int, height: int) -> int:
    """Return the number of lines that a pane of this size shows: those of two columns where all of the last ones fit."""
    rows = _count_rows(height)
    if width < _TWO_COLUMNS_FROM or len(pane.lines) <= rows or rows == height:
        return rows
    # Of the newest lines, also while older ones are shown: scrolling does not change the columns.
    last = pane.lines[-max(_LAST_LINES, 2 * rows) :]
    return 2 * rows if all(cell_width(line.expandtabs(8)) <= _measure_column(width) for line in last) else rows


def _count_rows(height: int) -> int:
    return height - (height >= 3)


def _measure_column(width: int) -> int:
    return (width - len(" | ")) // 2


def _draw_position(pane: Pane, end: int, at_begin: bool) -> Row:
    """Draw the number of newer lines below, if any."""
    hidden = len(pane.lines) - end
    if not hidden:
        return ()
    more = "more than " if pane.has_newer else ""
    note: Row = ((f" {more}{format_grouped(hidden)} newer below", "title-warn"),)
    return (*note, (", this is the beginning", "title-value")) if at_begin else note
