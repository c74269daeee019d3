"""The chosen rank beside the others, figure by figure."""

from __future__ import annotations

from zerotop.analysis.formatting import plural
from zerotop.analysis.ranks.matrix import RECENT, Metric
from zerotop.analysis.ranks.outliers import Compared
from zerotop.ui.drawing.formatting import MISSING
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, filled, to_height
from zerotop.ui.drawing.table import Column, place, rule
from zerotop.ui.drawing.text import fit, literal
from zerotop.ui.live.memory import panel_title
from zerotop.ui.ranks.labels import NAMES, STYLES, figure, unit
from zerotop.ui.ranks.model import Picture

_FIGURE = 9
_WIDEST = 52  # figures further apart are hard to read across


def draw_table(picture: Picture, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Title, a row for each figure: this rank, the rank in the middle, the difference; what these are medians of."""
    table = picture.table
    if picture.chosen is None or not table:
        return to_height([rule(panel_title("Rank", focused), width, glyphs)], width, height, glyphs)
    matrix = picture.matrix
    host = fit(literal(matrix.hosts[picture.chosen], glyphs), 16, glyphs, words=False)
    placed = place(_columns(glyphs), min(width, _WIDEST))
    name: Row = (*panel_title(f"Rank {matrix.ranks[picture.chosen]}", focused), (f" {host}", "muted"))
    if width < 46:
        name = panel_title(f"Rank {matrix.ranks[picture.chosen]}", focused)
    rows = [rule(name, width, glyphs, placed), *(placed.row(one, width, glyphs) for one in table)]
    rows += _foot(picture, width, height - len(rows), glyphs)
    return to_height(rows, width, height, glyphs)


def _columns(glyphs: Glyphs) -> list[Column[Compared]]:
    return [
        Column((), 16, 9, lambda one, width: _name(one, glyphs), grows=True, left=True),
        Column((("rank", "heading"),), _FIGURE, 9, lambda one, width: _value(one.own, one, width, "value")),
        Column((("median", "heading"),), _FIGURE, 5, lambda one, width: _value(one.usual, one, width, "text")),
        Column((("diff", "heading"),), 7, 7, lambda one, width: _difference(one, width, glyphs)),
    ]


def _name(one: Compared, glyphs: Glyphs) -> Row:
    style = STYLES.get(one.metric)
    swatch = glyphs.sample(style) if style else " "
    return ((f"{swatch} ", style or "text"), (NAMES[one.metric], "text"))


def _value(value: float, one: Compared, width: int, style: str) -> Row:
    largest = max(abs(one.own), abs(one.usual))
    named, factor = unit(one.metric, largest)
    return ((f"{figure(value * factor, largest * factor, width - 4)} {named:<3}"[:width].rjust(width), style),)


def _difference(one: Compared, width: int, glyphs: Glyphs) -> Row:
    if not one.usual > 0 or one.metric is Metric.WAIT:
        text = glyphs.plain(MISSING) if one.alike else "more"
    else:
        share = (one.own - one.usual) / one.usual
        text = f"{abs(share) * 100:.0f} %" if abs(share) < 9.995 else f"{glyphs.times}{one.own / one.usual:.0f}"
        if abs(share) < 9.995:
            text = ("+" if share >= 0 else glyphs.minus) + text if text != "0 %" else "0 %"
    return ((text.rjust(width), "muted" if one.alike else "warn"),)


def _foot(picture: Picture, width: int, room: int, glyphs: Glyphs) -> list[Row]:
    """What the figures are."""
    count = min(RECENT, len(picture.matrix.steps))
    lines = [f"medians of {plural(count, 'step')}"]
    rows = [filled(((fit(f"  {line}", width, glyphs), "muted"),), width, glyphs) for line in lines]
    return rows if room >= len(rows) else []
