"""Horizontal bars of stacked parts, exact to an eighth of a cell where the terminal can show it."""

from __future__ import annotations

from collections.abc import Sequence

from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, merged

Part = tuple[str, float]  # style name, amount


def stacked_bar(
    parts: Sequence[Part],
    total: float,
    width: int,
    glyphs: Glyphs,
    *,
    rest: str = "memory-free",
    marks: Sequence[float] = (),
) -> Row:
    """Parts side by side on a scale from 0 to ``total``; ``rest`` fills what they leave; ``marks`` are thin lines."""
    if width <= 0:
        return ()
    edges = _edges(parts, total, width * 8)
    spans = [_cell(edges, rest, cell, glyphs) for cell in range(width)]
    for mark in marks:
        _mark(spans, mark / total if total > 0 else 0.0, glyphs)
    return merged(spans)


def _edges(parts: Sequence[Part], total: float, eighths: int) -> list[tuple[str, int]]:
    """(style, where it ends in eighths of a cell); something that is not nothing takes at least one."""
    edges: list[tuple[str, int]] = []
    amount, end = 0.0, 0
    for style, part in parts:
        amount += max(0.0, part)
        exact = round(amount / total * eighths) if total > 0 else 0
        end = min(eighths, max(end + (1 if part > 0 else 0), exact))
        edges.append((style, end))
    return edges


def _cell(edges: Sequence[tuple[str, int]], rest: str, cell: int, glyphs: Glyphs) -> Span:
    """The character of one cell, which the two largest parts in it share."""
    covers: list[tuple[int, str]] = []
    begin = cell * 8
    for style, end in (*edges, (rest, (cell + 1) * 8)):
        covered = min(end, (cell + 1) * 8) - begin
        if covered > 0:
            covers.append((covered, style))
            begin += covered
    if len(covers) > 2:
        smallest = sorted(range(len(covers)), key=lambda index: covers[index][0])[: len(covers) - 2]
        covers = [cover for index, cover in enumerate(covers) if index not in smallest]
    covered, style = covers[0]
    if len(covers) == 1:
        return _whole(style, style == rest, glyphs)
    if not glyphs.smooth:
        best = max(covers)[1] if covered != covers[1][0] else style
        return _whole(best, best == rest, glyphs)
    eighth = round(covered * 8 / (covered + covers[1][0]))
    return glyphs.right[min(7, max(1, eighth))], f"{style}/{covers[1][1]}"


def _whole(style: str, is_rest: bool, glyphs: Glyphs) -> Span:
    """A cell of one part. What is not used is a background, so that it reads as nothing where text is copied."""
    return (" ", f"text/{style}") if is_rest and glyphs.smooth else (glyphs.part(style), style)


def _mark(spans: list[Span], place: float, glyphs: Glyphs) -> None:
    """A thin line at a share of the bar's length, over whatever colour lies there."""
    cell = min(len(spans) - 1, max(0, int(place * len(spans) - 1e-9)))
    style = spans[cell][1].split("/")[-1]
    spans[cell] = (glyphs.peak, f"peak/{style}" if glyphs.smooth else "peak")
