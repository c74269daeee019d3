"""Filled areas, stacked bands and bands between two values, exact to an eighth of a cell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zerotop.ui.charts.canvas import EIGHTHS, SPACE, Canvas, heights
from zerotop.ui.charts.columns import Numbers

Ints = NDArray[np.int64]
Layer = tuple[str, Numbers]  # style, amount in each column

_UPPER, _MIDDLE, _LOWER = ord("▔"), ord("━"), ord("▂")


def area(canvas: Canvas, values: Numbers, style: str, *, top: float, bottom: float = 0.0) -> None:
    """Fills each cell column from ``bottom`` up to its value, shape (``canvas.width``,). NaN leaves it empty."""
    with np.errstate(invalid="ignore"):  # of infinities
        above = np.asarray(values, np.float64) - bottom
    stack(canvas, [(style, above)], top=top - bottom)


def stack(canvas: Canvas, layers: Sequence[Layer], *, top: float) -> None:
    """Stacks layers upwards from 0; each has one amount for each cell column. NaN and less than nothing count as nothing.

    A cell in which two layers meet is split between them; of three, the two largest are seen. A column that is not nothing
    is seen, however little it is. What lies beyond ``top`` is left out.
    """
    if not canvas.width or not canvas.height or not layers:
        return
    edges = _edges(canvas, layers, top)
    floor = (8 * np.arange(canvas.height - 1, -1, -1))[:, None]
    covers = np.clip(edges[1:, None, :] - floor, 0, 8) - np.clip(edges[:-1, None, :] - floor, 0, 8)
    filled = covers.sum(axis=0)
    numbers = np.array([canvas.number(style) for style, _ in layers], np.int16)
    largest = covers.argmax(axis=0)
    if not canvas.glyphs.smooth:
        _whole_cells(canvas, largest, filled >= 4, [canvas.glyphs.part(style) for style, _ in layers], numbers)
        return
    canvas.back = np.where((filled > 0) & (filled < 8), canvas.shown(), canvas.back)
    canvas.characters = np.where(filled > 0, EIGHTHS[filled], canvas.characters)
    canvas.fore = np.where(filled > 0, numbers[largest], canvas.fore)
    if len(layers) > 1:
        _split(canvas, covers, largest, filled == 8, numbers)


def _edges(canvas: Canvas, layers: Sequence[Layer], top: float) -> Ints:
    """Where layers end, in eighths of a cell from below, shape (layers + 1, width); the first row is the ground."""
    amounts = np.zeros((len(layers) + 1, canvas.width))
    for row, (_, values) in zip(amounts[1:], layers, strict=True):
        row[: len(values)] = np.maximum(0.0, np.nan_to_num(np.asarray(values, np.float64)[: canvas.width], posinf=1e300))
    with np.errstate(over="ignore"):
        sums = np.minimum(amounts.cumsum(axis=0), 1e300)
    edges: Ints = np.rint(np.nan_to_num(heights(sums, 0.0, top, 8 * canvas.height))).astype(np.int64)
    little = (edges[-1] == 0) & (sums[-1] > 0)
    edges[1:, little] = np.cumsum(amounts[1:, little] == amounts[1:, little].max(axis=0, initial=0), axis=0) > 0
    return edges


def _split(
    canvas: Canvas, covers: Ints, largest: NDArray[np.intp], full: NDArray[np.bool_], numbers: NDArray[np.int16]
) -> None:
    """Divides full cells in which layers meet between the two largest of them."""
    meeting = np.flatnonzero((full & (covers.max(axis=0) < 8)).ravel())
    if not len(meeting):
        return
    here = covers.reshape(len(covers), -1)[:, meeting]
    one = largest.ravel()[meeting]
    rest = here.copy()
    rest[one, np.arange(len(meeting))] = 0
    other = rest.argmax(axis=0)
    lower, upper = np.minimum(one, other), np.maximum(one, other)
    sizes = np.take_along_axis(here, np.stack((lower, upper)), axis=0)
    eighths = np.rint(sizes[0] * 8 / sizes.sum(axis=0)).astype(np.int64)
    canvas.characters.ravel()[meeting] = EIGHTHS[eighths]
    canvas.fore.ravel()[meeting] = numbers[lower]
    canvas.back.ravel()[meeting] = numbers[upper]


def _whole_cells(
    canvas: Canvas, part: NDArray[np.intp], there: NDArray[np.bool_], letters: Sequence[str], numbers: NDArray[np.int16]
) -> None:
    characters = np.array([ord(letter) for letter in letters], np.uint32)
    canvas.characters = np.where(there, characters[part], canvas.characters)
    canvas.fore = np.where(there, numbers[part], canvas.fore)


def band(
    canvas: Canvas, low: Numbers, high: Numbers, style: str, *, top: float, bottom: float = 0.0, letter: str = ":"
) -> None:
    """Fills between two values of each cell column: quantiles behind a line. NaN leaves a column empty.

    Args:
        letter: what it is made of where cells have no colours of their own behind them.
    """
    if not canvas.width or not canvas.height:
        return
    begin, end = _band_edges(canvas, low, high, bottom, top)
    floor = (8 * np.arange(canvas.height - 1, -1, -1))[:, None]
    lower, upper = np.clip(begin - floor, 0, 8), np.clip(end - floor, 0, 8)
    number = canvas.number(style)
    if not canvas.glyphs.smooth:
        there = upper - lower >= 4
        canvas.characters = np.where(there, np.uint32(ord(letter)), canvas.characters)
        canvas.fore = np.where(there, np.int16(number), canvas.fore)
        return
    behind = canvas.shown()
    full = (lower == 0) & (upper == 8)
    from_below = (lower == 0) & (upper > 0) & ~full
    from_above = (lower > 0) & (lower < 8) & (upper == 8)
    within = (lower > 0) & (upper < 8) & (upper > lower)
    thin = np.where(lower >= 5, _UPPER, np.where(upper <= 3, _LOWER, _MIDDLE))
    canvas.characters = np.select(
        [full, from_below, from_above, within], [SPACE, EIGHTHS[upper], EIGHTHS[lower], thin], canvas.characters
    ).astype(np.uint32)
    ground = np.where(behind > 0, behind, canvas.number("ground"))
    blocks = from_below | within
    canvas.fore = np.select([blocks, from_above], [np.int16(number), ground], canvas.fore).astype(np.int16)
    canvas.back = np.select([full | from_above, blocks], [np.int16(number), behind], canvas.back).astype(np.int16)


def _band_edges(canvas: Canvas, low: Numbers, high: Numbers, bottom: float, top: float) -> tuple[Ints, Ints]:
    """Begin and end of the band in eighths from below; at least one eighth where it is known, (0, 0) where it is not."""
    values = np.full((2, canvas.width), np.nan)
    for row, given in zip(values, (low, high), strict=True):
        row[: len(given)] = given[: canvas.width]
    places = heights(values, bottom, top, 8 * canvas.height)
    known = ~np.isnan(places).any(axis=0)
    eighths = np.rint(np.nan_to_num(places)).astype(np.int64)
    begin = np.minimum(eighths.min(axis=0), 8 * canvas.height - 1)
    return np.where(known, begin, 0), np.where(known, np.maximum(eighths.max(axis=0), begin + 1), 0)


