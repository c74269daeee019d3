"""Tables without lines: headings sit in the panel's rule, one column takes what the others leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, fit_row, merge_spans, row_width

Item = TypeVar("Item")


@dataclass(frozen=True)
class Column(Generic[Item]):
    """A column. ``cell`` gets the item and the width to fill.

    ``width`` is in cells; a column with ``grows`` gets more. The least important columns go first where there
    is no room; importance 9 always stays.
    """

    heading: Row | Callable[[int], Row]  # the latter for one that depends on the column's width
    width: int
    importance: int
    draw_cell: Callable[[Item, int], Row]
    grows: bool = False
    left: bool = False  # where the heading is aligned


@dataclass(frozen=True)
class PlacedColumns(Generic[Item]):
    """Columns with their widths and where they begin."""

    columns: tuple[tuple[Column[Item], int, int], ...]  # column, begin, width

    def draw_row(self, item: Item, width: int, glyphs: Glyphs) -> Row:
        """One item's row, exactly ``width`` cells."""
        spans: list[Span] = []
        at = 0
        for column, begin, size in self.columns:
            spans.append((" " * (begin - at), "text"))
            cell = column.draw_cell(item, size)
            missing = size - row_width(cell)
            spans.extend(cell if missing >= 0 else fit_row(cell, size, glyphs))
            spans.append((" " * missing, "text"))
            at = begin + size
        if at > width:
            return fit_row(merge_spans(spans), width, glyphs)
        spans.append((" " * (width - at), "text"))
        return merge_spans(spans)


def place_columns(columns: Sequence[Column[Item]], width: int, gap: int = 1) -> PlacedColumns[Item]:
    """Chooses the columns that fit in ``width`` and gives the growing ones the rest."""
    kept = list(columns)
    while _sum_widths(kept, gap) > width and any(column.importance < 9 for column in kept):
        kept.remove(min(kept, key=lambda column: column.importance))
    spare = max(0, width - _sum_widths(kept, gap))
    growing = [column for column in kept if column.grows]
    placed: list[tuple[Column[Item], int, int]] = []
    begin = 0
    for column in kept:
        extra = spare // len(growing) if column.grows else 0
        size = column.width + extra
        placed.append((column, begin, size))
        begin += size + gap
    return PlacedColumns(tuple(placed))


def _sum_widths(columns: Sequence[Column[Item]], gap: int) -> int:
    return sum(column.width for column in columns) + gap * (len(columns) - 1)


def draw_rule(title: Row, width: int, glyphs: Glyphs, placed: PlacedColumns[Item] | None = None) -> Row:
    """A panel's first row: a line with the title in it, and the columns' headings over their columns."""
    spans: list[Span] = [*title, (" ", "rule")] if title else []
    at = row_width(spans)
    for column, begin, size in placed.columns if placed else ():
        text = column.heading(size) if callable(column.heading) else column.heading
        heading = row_width(text)
        start = begin if column.left else begin + size - heading
        if not heading or start < at or start + heading > width:
            continue
        lead = start - at
        spans.extend([(glyphs.rule * (lead - 1), "rule"), (" " * min(lead, 1), "rule"), *text])
        at = start + heading
        if at < width:
            spans.append((" ", "rule"))
            at += 1
    spans.append((glyphs.rule * (width - at), "rule"))
    return fit_row(merge_spans(spans), width, glyphs)
