"""Vertical columns of stacked parts, one for each value, exact to an eighth of a cell."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from zerotop.ui.charts.bars import Part
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Span


@lru_cache(maxsize=4096)
def draw_stacked_column(parts: tuple[Part, ...], top: float, height: int, glyphs: Glyphs) -> tuple[Span, ...]:
    """One cell for each row, the uppermost first, of parts stacked upwards on a scale from 0 to ``top``."""
    edges: list[tuple[str, float]] = []
    amount = 0.0
    for style, part in parts:
        amount += max(0.0, part)
        edges.append((style, min(1.0, amount / top) * height * 8 if top > 0 else 0.0))
    if edges and 0 < edges[-1][1] < 1:
        edges[-1] = (max(parts, key=lambda part: part[1])[0], 1.0)
    return tuple(_draw_cell(edges, row, glyphs) for row in reversed(range(height)))


def _draw_cell(edges: Sequence[tuple[str, float]], row: int, glyphs: Glyphs) -> Span:
    """The cell above ``row`` rows: the two parts that cover most of it, or one and the background."""
    covers: list[tuple[float, str]] = []
    bottom, top = row * 8.0, row * 8.0 + 8
    for style, end in edges:
        covered = min(end, top) - bottom
        if covered > 0:
            covers.append((covered, style))
            bottom += covered
    filled = sum(covered for covered, _ in covers)
    if round(filled) < 1:
        return " ", "text"
    if round(filled) < 8 or not glyphs.smooth:
        # A cell with background above it can show one part only: the largest.
        style = max(covers)[1]
        if glyphs.smooth:
            return glyphs.eighths[round(filled)], style
        return (glyphs.find_part(style), style) if filled >= 4 else (" ", "text")
    return _draw_full_cell(covers, glyphs)


def _draw_full_cell(covers: list[tuple[float, str]], glyphs: Glyphs) -> Span:
    largest = sorted(covers, reverse=True)[:2]
    lower, *upper = [cover for cover in covers if cover in largest]
    eighths = round(lower[0] * 8 / sum(covered for covered, _ in largest)) if upper else 8
    if eighths >= 8:
        return "█", lower[1]
    return ("█", upper[0][1]) if eighths <= 0 else (glyphs.eighths[eighths], f"{lower[1]}/{upper[0][1]}")
