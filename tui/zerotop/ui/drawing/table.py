"""Tables without lines: headings are part of the panel's rule, and growing columns share the spare width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

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


def place_columns(columns: Sequence[Column[Item]], width: int, gap: int = 1) -> PlacedColumns[Item]:
    """Choose the columns that fit in ``width`` and share the spare width among the growing ones."""
    chosen = list(columns)
    while _sum_widths(chosen, gap) > width and any(column.importance < 9 for column in chosen):
        chosen.remove(min(chosen, key=lambda column: column.importance))
    spare = max(0, width - _sum_widths(chosen, gap))
    growing = sum(column.grows for column in chosen)
    placed: list[tuple[Column[Item], int, int]] = []
    begin = 0
    for column in chosen:
        size = column.width + (spare // growing if column.grows else 0)
        placed.append((column, begin, size))
        begin += size + gap
    return PlacedColumns(tuple(placed))


def _sum_widths(columns: Sequence[Column[Item]], gap: int) -> int:
    return sum(column.width for column in columns) + gap * (len(columns) - 1)


def draw_rule(title: Row, width: int, glyphs: Glyphs, placed: PlacedColumns[Item] | None = None) -> Row:
    """Draw a panel's first row: a line with the title, and the headings above their columns."""
    spans: list[Span] = [*title, (" ", "rule")] if title else []
    end = row_width(spans)
    for column, begin, size in placed.columns if placed else ():
        heading = column.heading(size) if callable(column.heading) else column.heading
        row: Row = ((heading, "heading"),) if isinstance(heading, str) else heading
        length = row_width(row)
        start = begin if column.left else begin + size - length
        if not length or start < end or start + length > width:
            continue
        gap = start - end
        spans.extend([(glyphs.rule * (gap - 1), "rule"), (" " * min(gap, 1), "rule"), *row])
        end = start + length
        if end < width:
            spans.append((" ", "rule"))
            end += 1
    spans.append((glyphs.rule * (width - end), "rule"))
    return fit_row(merge_spans(spans), width, glyphs)


def panel_title(text: str, focused: bool) -> Row:
    """Return the title's spans at the left of a rule."""
    return ((text, "title-focused" if focused else "title"),)
