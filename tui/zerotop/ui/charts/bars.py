"""Horizontal bars of stacked parts, a part a colour, with thin lines at peaks."""

from __future__ import annotations

from collections.abc import Sequence

from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, merge_spans

Part = tuple[str, float]  # style name, amount


def draw_stacked_bar(
    parts: Sequence[Part],
    total: float,
    width: int,
    glyphs: Glyphs,
    *,
    rest: str = "memory-free",
    marks: Sequence[float] = (),
) -> Row:
    """Parts side by side on a scale from 0 to ``total``, in whole cells.

    ``rest`` fills what they leave; ``marks`` are thin lines at amounts.
    """
    if width <= 0:
        return ()
    styles = [rest] * width
    begin = 0
    for style, end in _find_ends(parts, total, width):
        styles[begin:end] = [style] * (end - begin)
        begin = max(begin, end)
    spans: list[Span] = [(glyphs.find_part(style), style) for style in styles]
    for mark in marks:
        place = min(width - 1, int(_compute_share(mark, total) * width - 1e-9))
        spans[place] = (glyphs.peak, f"peak/{styles[place]}" if glyphs.smooth else "peak")
    return merge_spans(spans)


def _compute_share(amount: float, total: float) -> float:
    """From 0 to 1, whatever the numbers are."""
    return min(1.0, amount / total) if total > 0 else 0.0


def _find_ends(parts: Sequence[Part], total: float, width: int) -> list[tuple[str, int]]:
    """Where parts end. The first that is not nothing is seen, however little it is; others from a quarter of a cell on."""
    ends: list[tuple[str, int]] = []
    amount, end = 0.0, 0
    for style, part in parts:
        amount += max(0.0, part)
        least = 1 if part > 0 and (end == 0 or _compute_share(part, total) * width >= 0.25) else 0
        end = min(width, max(end + least, round(_compute_share(amount, total) * width)))
        ends.append((style, end))
    return ends
