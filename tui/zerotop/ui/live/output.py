"""The job's own output, drawn literally."""

from __future__ import annotations

from dataclasses import dataclass, field

from zerotop.ui.drawing.formatting import grouped
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, filled, to_height
from zerotop.ui.drawing.table import rule
from zerotop.ui.drawing.text import fit, literal
from zerotop.ui.live.memory import panel_title


@dataclass(frozen=True, slots=True)
class Pane:
    """Lines, of which the last ``back`` lie below what is seen."""

    lines: tuple[str, ...]
    back: int = 0
    growing: bool = False  # lines came since, which are not among these
    seeks: int = field(default=0, compare=False)  # how often somebody has gone to another moment


def draw_output(
    pane: Pane, width: int, height: int, glyphs: Glyphs, *, focused: bool = False, nothing: str = ""
) -> list[Row]:
    """The pane's lines, or where there are none what is said instead. In one or two rows there is no title."""
    if height <= 0:
        return []
    lines, room = pane.lines, lines_seen(height)
    titled = room < height
    end = max(min(room, len(lines)), len(lines) - pane.back)
    shown = [literal(line, glyphs) for line in lines[max(0, end - room) : end]]
    rows: list[Row] = []
    if titled:
        rows.append(rule((*panel_title("Output", focused), *_place(pane, end, end <= room)), width, glyphs))
    lead = "" if titled else f"{glyphs.prompt} "
    rows.extend(
        filled(((lead, "muted"), (fit(line, width - len(lead), glyphs, words=False), "output")), width, glyphs)
        for line in shown
    )
    if not lines:
        rows.append(filled(((f"  {nothing}" if titled else "", "muted"),), width, glyphs))
    return to_height(rows, width, height, glyphs)


def lines_seen(height: int) -> int:
    """How many lines a pane of this height shows."""
    return height - (height >= 3)


def _place(pane: Pane, end: int, at_begin: bool) -> Row:
    """Says how far back the pane is, if it is."""
    hidden = len(pane.lines) - end
    if not hidden:
        return ()
    more = "more than " if pane.growing else ""
    note: Row = ((f" {more}{grouped(hidden)} newer below", "title-warn"),)
    return (*note, (", this is the begin", "title-value")) if at_begin else note
