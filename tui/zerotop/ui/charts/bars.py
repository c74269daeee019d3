"""Horizontal bars of stacked parts, one colour each, with thin lines at peaks."""

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
    """Draw parts side by side on a scale from 0 to ``total``, in whole cells.

    The first part above zero always has a cell; others need a quarter of a cell to get one.

    Args:
        rest: style of the cells after the last part.
        marks: amounts at which a thin line is drawn.
    """
    if width <= 0:
        return ()
    styles = [rest] * width
    amount, end = 0.0, 0
    for style, part in parts:
        amount += max(0.0, part)
        least = 1 if part > 0 and (end == 0 or _compute_share(part, total) * width >= 0.25) else 0
        begin, end = end, min(width, max(end + least, round(_compute_share(amount, total) * width)))
        styles[begin:end] = [style] * (end - begin)
    spans: list[Span] = [(glyphs.find_part(style), style) for style in styles]
    for mark in marks:
        x = min(width - 1, int(_compute_share(mark, total) * width - 1e-9))
        spans[x] = (glyphs.peak, f"peak/{styles[x]}" if glyphs.smooth else "peak")
    return merge_spans(spans)


def _compute_share(amount: float, total: float) -> float:
    """Return a share from 0 to 1, whatever the numbers are."""
    return min(1.0, amount / total) if total > 0 else 0.0
