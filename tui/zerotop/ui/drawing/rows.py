"""Rows of a panel: spans of text with the name of a style, to which the theme gives colours.

A style name may be ``a/b``: the colour of ``a`` on that of ``b`` as background, for a split cell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.text import cell_width, fit_text, is_narrow

Span = tuple[str, str]
Row = tuple[Span, ...]

EMPTY: Row = ()


def row_width(row: Collection[Span]) -> int:
    """Return the number of cells of a row."""
    text = row_text(row)  # one check instead of hundreds
    return len(text) if is_narrow(text) else sum([cell_width(text) for text, _ in row])


def row_text(row: Iterable[Span]) -> str:
    return "".join([text for text, _ in row])


def highlight_row(row: Row) -> Row:
    """Highlight a row of a table that is under the cursor."""
    return merge_spans((text, style if "/" in style else f"{style}/cursor-ground") for text, style in row)


def merge_spans(spans: Iterable[Span]) -> Row:
    """Join neighbours of the same style and drop empty spans."""
    result: list[Span] = []
    joined, joined_style = "", ""
    for text, style in spans:
        if style == joined_style:
            joined += text
        elif text:
            if joined:
                result.append((joined, joined_style))
            joined, joined_style = text, style
    if joined:
        result.append((joined, joined_style))
    return tuple(result)


def fit_row(row: Row, width: int, glyphs: Glyphs, style: str = "text") -> Row:
    """Pad a row on the right or cut it to exactly ``width`` cells, with an ellipsis unless only blanks are cut."""
    missing = width - row_width(row)
    if missing == 0:
        return row
    if missing > 0:
        return merge_spans((*row, (" " * missing, style)))
    result: list[Span] = []
    room = width
    for index, (text, span_style) in enumerate(row):
        if cell_width(text) > room:
            blank = text.isascii() and not (text[room:] + row_text(row[index + 1 :])).strip()
            short = text[:room] if blank else fit_text(text, room, glyphs)
            result.extend([(short, span_style), (" " * (room - cell_width(short)), style)])
            break
        result.append((text, span_style))
        room -= cell_width(text)
    return merge_spans(result)


def fit_height(rows: Sequence[Row], width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Cut rows of ``width`` cells to ``height`` rows, or add empty ones."""
    return [*rows[:height], *[fit_row((), width, glyphs)] * (height - len(rows))]


def align_ends(left: Row, right: Row, width: int, glyphs: Glyphs, style: str = "text") -> Row:
    """Place one row at the left edge and another at the right; ``left`` is cut if both do not fit."""
    room = width - row_width(right)
    if room < 0:
        return fit_row(right, width, glyphs, style)
    return merge_spans((*fit_row(left, room, glyphs, style), *right))


def choose_items(items: Sequence[tuple[int, Row]], width: int, gap: int = 2) -> list[Row]:
    """Drop the least important of (importance, row) until the others fit side by side; return their rows in order."""
    chosen = [(importance, index, row) for index, (importance, row) in enumerate(items) if row_width(row)]
    while chosen and sum(row_width(row) for _, _, row in chosen) + gap * (len(chosen) - 1) > width:
        chosen.remove(min(chosen, key=lambda item: (item[0], -item[1])))
    return [row for _, _, row in chosen]


def join_rows(rows: Sequence[Row], gap: int = 2, style: str = "text") -> Row:
    """Put rows side by side with ``gap`` cells in between."""
    spans: list[Span] = []
    for row in rows:
        if spans:
            spans.append((" " * gap, style))
        spans.extend(row)
    return merge_spans(spans)
