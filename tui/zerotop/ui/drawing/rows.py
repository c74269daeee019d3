"""A row of a panel: spans of text, each with the name of a style. Themes turn names into colours elsewhere.

A style name may be ``a/b``: the colour of ``a`` on that of ``b`` as background, for a cell split in two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.text import cell_width, fit_text, is_narrow

Span = tuple[str, str]
Row = tuple[Span, ...]

EMPTY: Row = ()


def row_width(row: Collection[Span]) -> int:
    """Cells a row takes."""
    text = row_text(row)  # of hundreds of spans, looked at in one go
    return len(text) if is_narrow(text) else sum([cell_width(text) for text, _ in row])


def row_text(row: Iterable[Span]) -> str:
    """A row without its styles."""
    return "".join([text for text, _ in row])


def merge_spans(spans: Iterable[Span]) -> Row:
    """Neighbours of the same style become one span; empty ones go."""
    result: list[Span] = []
    whole, before = "", ""
    for text, style in spans:
        if style == before:
            whole += text
        elif text:
            if whole:
                result.append((whole, before))
            whole, before = text, style
    if whole:
        result.append((whole, before))
    return tuple(result)


def fit_row(row: Row, width: int, glyphs: Glyphs, style: str = "text") -> Row:
    """Exactly ``width`` cells: padded on the right, or cut, with an ellipsis unless nothing but blanks is cut."""
    missing = width - row_width(row)
    if missing == 0:
        return row
    if missing > 0:
        return merge_spans((*row, (" " * missing, style)))
    result: list[Span] = []
    room = width
    for place, (text, span_style) in enumerate(row):
        if cell_width(text) > room:
            blank = text.isascii() and not (text[room:] + row_text(row[place + 1 :])).strip()
            short = text[:room] if blank else fit_text(text, room, glyphs)
            result.extend([(short, span_style), (" " * (room - cell_width(short)), style)])
            break
        result.append((text, span_style))
        room -= cell_width(text)
    return merge_spans(result)


def fit_height(rows: Sequence[Row], width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Exactly ``height`` rows: of those there are, which have their ``width``, the first ones, and then empty ones."""
    return [*rows[:height], *[fit_row((), width, glyphs)] * (height - len(rows))]


def align_ends(left: Row, right: Row, width: int, glyphs: Glyphs, style: str = "text") -> Row:
    """``left`` at the left edge, ``right`` at the right one; ``left`` gives way."""
    room = width - row_width(right)
    if room < 0:
        return fit_row(right, width, glyphs, style)
    return merge_spans((*fit_row(left, room, glyphs, style), *right))


def choose_items(items: Sequence[tuple[int, Row]], width: int, gap: int = 2) -> list[Row]:
    """Of (importance, row) in drawing order, the rows that fit side by side, the least important left out."""
    kept = [(importance, index, row) for index, (importance, row) in enumerate(items) if row_width(row)]
    while kept and sum(row_width(row) for _, _, row in kept) + gap * (len(kept) - 1) > width:
        kept.remove(min(kept, key=lambda item: (item[0], -item[1])))
    return [row for _, _, row in kept]


def join_rows(rows: Sequence[Row], gap: int = 2, style: str = "text") -> Row:
    """Rows side by side with ``gap`` cells in between."""
    spans: list[Span] = []
    for row in rows:
        if spans:
            spans.append((" " * gap, style))
        spans.extend(row)
    return merge_spans(spans)
