"""The job's own output, drawn literally."""

from __future__ import annotations

from dataclasses import dataclass, field

from zerotop.ui.drawing.formatting import format_grouped
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_height, fit_row
from zerotop.ui.drawing.table import draw_rule
from zerotop.ui.drawing.text import fit_text, sanitize
from zerotop.ui.live.memory import panel_title


@dataclass(frozen=True, slots=True)
class Pane:
    """Lines, of which the last ``back`` lie below what is seen."""

    lines: tuple[str, ...]
    lines_below: int = 0
    has_newer: bool = False  # lines came since, which are not among these
    seek_count: int = field(default=0, compare=False)  # how often somebody has gone to another moment


def draw_output(
    pane: Pane, width: int, height: int, glyphs: Glyphs, *, focused: bool = False, empty_text: str = ""
) -> list[Row]:
    """The pane's lines, or where there are none what is said instead. In one or two rows there is no title."""
    if height <= 0:
        return []
    lines, room = pane.lines, count_visible_lines(height)
    titled = room < height
    end = max(min(room, len(lines)), len(lines) - pane.lines_below)
    shown = [sanitize(line, glyphs) for line in lines[max(0, end - room) : end]]
    rows: list[Row] = []
    if titled:
        rows.append(draw_rule((*panel_title("Output", focused), *_draw_position(pane, end, end <= room)), width, glyphs))
    lead = "" if titled else f"{glyphs.prompt} "
    rows.extend(
        fit_row(((lead, "muted"), (fit_text(line, width - len(lead), glyphs, at_words=False), "output")), width, glyphs)
        for line in shown
    )
    if not lines:
        rows.append(fit_row(((f"  {empty_text}" if titled else "", "muted"),), width, glyphs))
    return fit_height(rows, width, height, glyphs)


def count_visible_lines(height: int) -> int:
    """How many lines a pane of this height shows."""
    return height - (height >= 3)


def _draw_position(pane: Pane, end: int, at_begin: bool) -> Row:
    """Says how far back the pane is, if it is."""
    hidden = len(pane.lines) - end
    if not hidden:
        return ()
    more = "more than " if pane.has_newer else ""
    note: Row = ((f" {more}{format_grouped(hidden)} newer below", "title-warn"),)
    return (*note, (", this is the begin", "title-value")) if at_begin else note
