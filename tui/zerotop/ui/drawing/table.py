"""Tables without lines: headings are part of the panel's rule, and growing columns share the spare width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from zerotop.analysis.formatting import format_count
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, fit_row, merge_spans, row_width

Item = TypeVar("Item")


@dataclass(frozen=True)
class Column(Generic[Item]):
    """A column of a table. The least important columns are dropped first; those of importance 9 never are."""

    heading: str | Row | Callable[[int], Row]  # a function gets the column's width
    width: int  # cells
    importance: int
    draw_cell: Callable[[Item, int], Row]  # gets the item and the width
    grows: bool = False  # takes a share of the spare width
    left: bool = False  # aligns the heading left


@dataclass(frozen=True)
class PlacedColumns(Generic[Item]):
    """Columns at their positions."""

    columns: tuple[tuple[Column[Item], int, int], ...]  # column, begin, width
    left_out: tuple[str, ...] = ()  # headings of the columns that do not fit

    def draw_row(self, item: Item, width: int, glyphs: Glyphs) -> Row:
        """Return one item's row, exactly ``width`` cells."""
        spans: list[Span] = []
        end = 0
        for column, begin, size in self.columns:
            spans.append((" " * (begin - end), "text"))
            cell = column.draw_cell(item, size)
            missing = size - row_width(cell)
            spans.extend(cell if missing >= 0 else fit_row(cell, size, glyphs))
            spans.append((" " * missing, "text"))
            end = begin + size
        if end > width:
            return fit_row(merge_spans(spans), width, glyphs)
        spans.append((" " * (width - end), "text"))
        return merge_spans(spans)


def place_columns(columns: Sequence[Column[Item]], width: int) -> PlacedColumns[Item]:
    """Choose the columns that fit in ``width`` and share the spare width among the growing ones."""
    chosen = list(columns)
    while _sum_widths(chosen) > width and any(column.importance < 9 for column in chosen):
        chosen.remove(min(chosen, key=lambda column: column.importance))
    spare = max(0, width - _sum_widths(chosen))
    growing = sum(column.grows for column in chosen)
    placed: list[tuple[Column[Item], int, int]] = []
    begin = 0
    for column in chosen:
        size = column.width + (spare // growing if column.grows else 0)
        placed.append((column, begin, size))
        begin += size + 1
    dropped = [_read_heading(column) for column in columns if column not in chosen]
    return PlacedColumns(tuple(placed), tuple(dict.fromkeys(text for text in dropped if text)))


def _read_heading(column: Column[Item]) -> str:
    """Return the words of a column's heading; empty if it has none of its own."""
    if callable(column.heading) or isinstance(column.heading, str):
        return column.heading.strip() if isinstance(column.heading, str) else ""
    return "".join(text for text, style in column.heading if style == "heading").strip()


def _sum_widths(columns: Sequence[Column[Item]]) -> int:
    return sum(column.width for column in columns) + len(columns) - 1


def draw_rule(title: Row, width: int, glyphs: Glyphs, placed: PlacedColumns[Item] | None = None) -> Row:
    """Draw a panel's first row: a line with the title, and the headings above their columns.

    ``+total, job`` names columns that were left out, or ``+2 columns`` counts them, in the first gap that is wide enough;
    where none is, nothing is said.
    """
    headings = _draw_headings(title, width, placed)
    left_out = placed.left_out if placed else ()
    texts = (f"+{', '.join(left_out)}", f"+{format_count(len(left_out), 'column')}")
    for text in texts if left_out else ():
        bounds = [*(begin for begin, _ in headings[1:]), width]
        for index, ((begin, row), bound) in enumerate(zip(headings, bounds, strict=True)):
            end = begin + row_width(row)
            if end + len(text) + 2 <= bound:
                headings.insert(index + 1, (end + 1, ((text, "muted"),)))
                return _join_headings(headings, width, glyphs)
    return _join_headings(headings, width, glyphs)


def _draw_headings(title: Row, width: int, placed: PlacedColumns[Item] | None) -> list[tuple[int, Row]]:
    """Return (begin, row) of the title and of each heading for which there is room."""
    headings: list[tuple[int, Row]] = [(0, title)]
    end = row_width(title) + 1 if title else 0
    for column, begin, size in placed.columns if placed else ():
        heading = column.heading(size) if callable(column.heading) else column.heading
        row: Row = ((heading, "heading"),) if isinstance(heading, str) else heading
        length = row_width(row)
        start = begin if column.left else begin + size - length
        if not length or start < end or start + length > width:
            continue
        headings.append((start, row))
        end = min(width, start + length + 1)
    return headings


def _join_headings(headings: Sequence[tuple[int, Row]], width: int, glyphs: Glyphs) -> Row:
    """Put headings at their places on a line, with a cell of space on both sides."""
    spans: list[Span] = []
    end = 0
    for begin, row in headings:
        gap = begin - end
        spans.extend([(glyphs.rule * (gap - 1), "rule"), (" " * min(max(gap, 0), 1), "rule"), *row])
        end = begin + row_width(row)
        if row and end < width:
            spans.append((" ", "rule"))
            end += 1
    spans.append((glyphs.rule * (width - end), "rule"))
    return fit_row(merge_spans(spans), width, glyphs)


def panel_title(text: str, focused: bool) -> Row:
    """Return the title's spans at the left of a rule."""
    return ((text, "title-focused" if focused else "title"),)
