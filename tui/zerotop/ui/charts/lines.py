"""Lines of braille dots, two dot columns and four dot rows to a cell, from each column's lowest to its highest value."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zerotop.ui.charts.canvas import BRAILLE, Canvas, choose_visible, scale_heights
from zerotop.ui.charts.columns import Numbers

Dots = NDArray[np.int16]

# Braille bits of the left and the right half of a cell, from the lowest dot up.
_HALVES = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))
# The bits of the dots from ``low`` to before ``high`` (each 0 to 4), at index 5 * high + low.
_LEFT, _RIGHT = (np.array([sum(half[low:high]) for high in range(5) for low in range(5)], np.uint8) for half in _HALVES)
_LETTERS = "*+ox#%@&"  # for lines without braille, in drawing order
_LETTER_SPACING = 24  # cells between the letters that name a line without colours


def plot_line(canvas: Canvas, low: Numbers, high: Numbers, style: str, *, top: float, letter: str = "") -> None:
    """Draw a line on a scale from 0 to ``top``, with values outside it at the edge.

    Neighbouring columns are joined; a column that is NaN interrupts the line.

    Args:
        low, high: the lowest and highest value of each dot column, shape (``canvas.dot_columns``,); may be the same array.
        letter: draws the line where there is no braille, and names it where there are no colours.
    """
    if not canvas.width or not canvas.height:
        return
    lowest, highest = _join_columns(*_compute_dot_rows(canvas, low, high, top))
    if canvas.glyphs.name == "ascii":
        _plot_characters(canvas, lowest, highest, style, letter)
        return
    bits = _compute_bits(lowest, highest, canvas.height).ravel()
    drawn = np.flatnonzero(bits)
    characters, fore, back = canvas.characters.ravel(), canvas.fore.ravel(), canvas.back.ravel()  # views
    before = characters[drawn]
    back[drawn] = choose_visible(before, fore[drawn], back[drawn])
    dotted = before >> 8 == BRAILLE >> 8
    characters[drawn] = np.where(dotted, before, np.uint32(BRAILLE)) | bits[drawn]
    fore[drawn] = canvas.number_style(style)
    if letter and not canvas.glyphs.smooth:
        _plot_letters(canvas, highest, style, letter)


def _compute_dot_rows(canvas: Canvas, low: Numbers, high: Numbers, top: float) -> tuple[Dots, Dots]:
    """Return the lowest and highest dot row of each dot column, counted from below; (size, -1) for NaN."""
    size = 4 * canvas.height
    values = np.full((2, canvas.dot_columns), np.nan)
    for row, source in zip(values, (low, high), strict=True):
        row[: len(source)] = source[: canvas.dot_columns]
    heights = scale_heights(np.stack((np.fmin(*values), np.fmax(*values))), top, size)
    missing = np.isnan(heights).any(axis=0)
    dots = np.maximum(np.ceil(np.where(missing, 0.0, heights)) - 1, 0).astype(np.int16)
    return np.where(missing, np.int16(size), dots[0]), np.where(missing, np.int16(-1), dots[1])


def _join_columns(low: Dots, high: Dots) -> tuple[Dots, Dots]:
    """Extend each column half way to its neighbours, so that they touch."""
    both = (high[1:] >= 0) & (high[:-1] >= 0)
    joined_low, joined_high = low.copy(), high.copy()
    rising, falling = both & (low[1:] > high[:-1] + 1), both & (high[1:] < low[:-1] - 1)
    middle = (low[1:] + high[:-1]) // 2
    joined_high[:-1][rising] = middle[rising]
    joined_low[1:][rising] = middle[rising] + 1
    middle = (low[:-1] + high[1:]) // 2
    joined_low[:-1][falling] = np.minimum(joined_low[:-1], middle + 1)[falling]
    joined_high[1:][falling] = np.maximum(joined_high[1:], middle)[falling]
    return joined_low, joined_high


def _compute_bits(low: Dots, high: Dots, height: int) -> NDArray[np.uint8]:
    """Return the braille bits of each cell, shape (height, width), the uppermost row first."""
    base = (4 * np.arange(height - 1, -1, -1, dtype=np.int16))[:, None]
    index = 5 * np.clip(high + 1 - base, 0, 4) + np.clip(low - base, 0, 4)
    cells: NDArray[np.uint8] = _LEFT[index[:, 0::2]] | _RIGHT[index[:, 1::2]]
    return cells


def _plot_characters(canvas: Canvas, low: Dots, high: Dots, style: str, letter: str) -> None:
    """Draw the line in whole cells."""
    number = canvas.number_style(style)
    character = ord(letter or _LETTERS[(number - 1) % len(_LETTERS)])
    lowest, highest = np.minimum(low[0::2], low[1::2]) // 4, np.maximum(high[0::2], high[1::2]) // 4
    rows = np.arange(canvas.height - 1, -1, -1)[:, None]
    drawn = (rows >= lowest) & (rows <= highest)
    canvas.characters[drawn] = character
    canvas.fore[drawn] = number


def _plot_letters(canvas: Canvas, high: Dots, style: str, letter: str) -> None:
    """Write letters along a line, in other columns for each style."""
    tops = np.maximum(high[0::2], high[1::2]) // 4
    first = canvas.number_style(style) * 5 % _LETTER_SPACING
    for x in range(first, canvas.width, _LETTER_SPACING):
        if high[2 * x] >= 0 or high[2 * x + 1] >= 0:
            canvas.write_mark(x, canvas.height - 1 - int(tops[x]), letter, style)
