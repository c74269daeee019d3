"""Horizontal bars of stacked parts, exact to an eighth of a cell where the terminal can show it."""

from __future__ import annotations

from collections.abc import Sequence

from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, merged

Part = tuple[str, float]  # style name, amount
Edge = tuple[str, int]  # style name, where the part ends, in eighths of a cell


def stacked_bar(
    parts: Sequence[Part],
    total: float,
    width: int,
    glyphs: Glyphs,
    *,
    rest: str = "memory-free",
    marks: Sequence[float] = (),
) -> Row:
    """Parts side by side on a scale from 0 to ``total``.

    ``rest`` fills what they leave; ``marks`` are thin lines at amounts.
    """
    if width <= 0:
        return ()
    edges = [*_edges(parts, total, width * 8), (rest, width * 8)]
    places = (int(_share(mark, total) * width - 1e-9) for mark in marks if total > 0)
    stops = sorted({min(width - 1, max(0, place)) for place in places})
    spans: list[Span] = []
    cell = 0
    for stop in stops:
        spans.extend(_run(edges, cell, stop, rest, glyphs))
        under = _run(edges, stop, stop + 1, rest, glyphs)[0][1].split("/")[-1]
        spans.append((glyphs.peak, f"peak/{under}" if glyphs.smooth else "peak"))
        cell = stop + 1
    spans.extend(_run(edges, cell, width, rest, glyphs))
    return merged(spans)


def _share(amount: float, total: float) -> float:
    """From 0 to 1, whatever the numbers are."""
    return min(1.0, amount / total) if total > 0 else 0.0


def _edges(parts: Sequence[Part], total: float, eighths: int) -> list[Edge]:
    """Where parts end; something that is not nothing takes at least an eighth of a cell."""
    edges: list[Edge] = []
    amount, end = 0.0, 0
    for style, part in parts:
        amount += max(0.0, part)
        exact = round(_share(amount, total) * eighths)
        end = min(eighths, max(end + (1 if part > 0 else 0), exact))
        edges.append((style, end))
    return edges


def _run(edges: Sequence[Edge], begin: int, end: int, rest: str, glyphs: Glyphs) -> list[Span]:
    """The cells from ``begin`` to before ``end``: stretches of one part, and cells that parts share."""
    spans: list[Span] = []
    cell = begin
    while cell < end:
        style, edge = next(edge for edge in edges if edge[1] > cell * 8)
        whole = min(end, edge // 8) - cell
        if whole > 0:
            spans.append(_whole(style, style == rest, whole, glyphs))
            cell += whole
        else:
            spans.append(_shared(edges, cell, rest, glyphs))
            cell += 1
    return spans


def _whole(style: str, is_rest: bool, count: int, glyphs: Glyphs) -> Span:
    """Cells of one part. What is free is a background, so that it reads as nothing where text is copied."""
    return (
        (" " * count, f"text/{style}") if is_rest and glyphs.smooth else (glyphs.part(style) * count, style)
    )


def _shared(edges: Sequence[Edge], cell: int, rest: str, glyphs: Glyphs) -> Span:
    """A cell that several parts lie in: the two largest share it, in order."""
    covers: list[tuple[int, str]] = []
    begin = cell * 8
    for style, edge in edges:
        covered = min(edge, (cell + 1) * 8) - begin
        if covered > 0:
            covers.append((covered, style))
            begin += covered
    while len(covers) > 2:
        covers.remove(min(covers))
    (first, left), (second, right) = covers
    if not glyphs.smooth:
        best = left if first >= second else right
        return _whole(best, best == rest, 1, glyphs)
    eighth = round(first * 8 / (first + second))
    return glyphs.right[min(7, max(1, eighth))], f"{left}/{right}"
