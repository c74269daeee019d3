"""The job's own output."""

from __future__ import annotations

from zerotop.ui.base.frame import Pane
from zerotop.ui.drawing.formatting import format_grouped
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_height, fit_row
from zerotop.ui.drawing.table import draw_rule, panel_title
from zerotop.ui.drawing.text import fit_text, sanitize


def draw_output(
    pane: Pane, width: int, height: int, glyphs: Glyphs, *, focused: bool = False, empty_text: str = ""
) -> list[Row]:
    """Draw the pane's last visible lines, or ``empty_text``; with a title in three rows or more."""
    if height <= 0:
        return []
    lines, room = pane.lines, count_visible_lines(height)
    has_title = room < height
    end = max(min(room, len(lines)), len(lines) - pane.lines_below)
    shown = [sanitize(line, glyphs) for line in lines[max(0, end - room) : end]]
    rows: list[Row] = []
    if has_title:
        rows.append(draw_rule((*panel_title("Output", focused), *_draw_position(pane, end, end <= room)), width, glyphs))
    lead = "" if has_title else f"{glyphs.prompt} "
    rows.extend(
        fit_row(((lead, "muted"), (fit_text(line, width - len(lead), glyphs, at_words=False), "output")), width, glyphs)
        for line in shown
    )
    if not lines:
        rows.append(fit_row(((f"  {empty_text}" if has_title else "", "muted"),), width, glyphs))
    return fit_height(rows, width, height, glyphs)


def count_visible_lines(height: int) -> int:
    """Return the number of lines that a pane of this height shows."""
    return height - (height >= 3)


def _draw_position(pane: Pane, end: int, at_begin: bool) -> Row:
    """Draw the number of newer lines below, if any."""
    hidden = len(pane.lines) - end
    if not hidden:
        return ()
    more = "more than " if pane.has_newer else ""
    note: Row = ((f" {more}{format_grouped(hidden)} newer below", "title-warn"),)
    return (*note, (", this is the beginning", "title-value")) if at_begin else note
