"""The job's own output, drawn literally."""

from __future__ import annotations

from collections.abc import Sequence

from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.memory import panel_title
from zerotop.ui.drawing.rows import Row, filled
from zerotop.ui.drawing.table import rule
from zerotop.ui.drawing.text import fit, literal


def draw_output(
    lines: Sequence[str], back: int, width: int, height: int, glyphs: Glyphs, *, focused: bool = False
) -> list[Row]:
    """The last lines, ``back`` lines before the end. In one or two rows there is no title."""
    if height <= 0:
        return []
    titled = height >= 3
    room = height - titled
    end = max(min(room, len(lines)), len(lines) - back)
    shown = [literal(line, glyphs) for line in lines[max(0, end - room) : end]]
    rows: list[Row] = []
    if titled:
        rows.append(rule(_title(lines, end, focused), width, glyphs))
    lead = "" if titled else f"{glyphs.prompt} "
    rows.extend(
        filled(((lead, "muted"), (fit(line, width - len(lead), glyphs, words=False), "output")), width, glyphs)
        for line in shown
    )
    if not lines:
        rows.append(filled((("  nothing printed yet" if titled else "", "muted"),), width, glyphs))
    return (rows + [filled((), width, glyphs)] * height)[:height]


def _title(lines: Sequence[str], end: int, focused: bool) -> Row:
    hidden = len(lines) - end
    note: Row = ((f" {hidden} newer below", "title-warn"),) if hidden else ()
    return (*panel_title("Output", focused), *note)


def furthest_back(lines: int, height: int) -> int:
    """The largest ``back`` that still shows a whole pane."""
    return max(0, lines - (height - (height >= 3)))
