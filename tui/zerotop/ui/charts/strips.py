"""Strips: a value over the last while, one column of cells for each sample, the newest at the right."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from zerotop.ui.charts.canvas import Canvas
from zerotop.ui.charts.columns import Floats, Ints
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row

GROUND_STYLE = "strip"


def find_pieces(length: int, width: int) -> Ints:
    """Return how many pieces before the last one each column shows: one each, or fewer pieces stretched to the width."""
    return np.arange(width - 1, -1, -1) * min(length, width) // max(1, width)


def draw_strip(
    values: Sequence[float] | Floats, styles: Sequence[str], top: float, width: int, height: int, glyphs: Glyphs
) -> list[Row]:
    """Draw the last ``width`` values, each in its style, on a scale from 0 to ``top`` in ``height`` rows.

    A column without a value, or with NaN, stays empty; a value above zero has at least an eighth of a cell. The uppermost
    row is never quite full, so that strips one above the other do not touch.
    """
    canvas = Canvas(width, height, glyphs)
    count = min(canvas.width, len(values))
    recent = np.asarray(values[len(values) - count :], np.float64)
    positive = (recent > 0) & (0 < top < math.inf)
    eighths = np.zeros(canvas.width, np.int64)
    eighths[canvas.width - count :][positive] = np.maximum(
        1, np.rint(np.minimum(recent[positive], top) / top * (8 * height - 1))
    )
    below = 8 * np.arange(canvas.height - 1, -1, -1)[:, None]
    characters = np.array([ord(character) for character in glyphs.levels], np.uint32)
    canvas.characters[:] = characters[np.clip(eighths - below, 0, 8)]
    canvas.fore[:, canvas.width - count :] = [canvas.number_style(style) for style in styles[len(styles) - count :]]
    canvas.back[:] = canvas.number_style(GROUND_STYLE)
    return canvas.to_rows()
