"""Filled areas, stacked bands and bands between two values, exact to an eighth of a cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.ui.charts.canvas import EIGHTHS, SPACE, Canvas, choose_visible, scale_heights
from zerotop.ui.charts.columns import Numbers

Ints = NDArray[np.int64]
Eighths = NDArray[np.int16]
Layer = tuple[str, Numbers]  # style, amount in each column

_UPPER, _MIDDLE, _LOWER = ord("▔"), ord("━"), ord("▂")


def plot_area(canvas: Canvas, values: Numbers, style: str, *, top: float, bottom: float = 0.0) -> None:
    """Fills each cell column from ``bottom`` up to its value, shape (``canvas.width``,). NaN leaves it empty."""
    with np.errstate(invalid="ignore", over="ignore"):  # of infinities, and of what is beyond all numbers
        above = np.asarray(values, np.float64) - bottom
    plot_stack(canvas, [(style, above)], top=top - bottom)


class Pile(NamedTuple):
    """Layers upon one another in some rows of a canvas; ``top`` is the value at the upper edge of these rows."""

    row: int
    rows: int
    layers: Sequence[Layer]
    top: float


def plot_stack(canvas: Canvas, layers: Sequence[Layer], *, top: float) -> None:
    """Stacks layers upwards from 0; each has one amount for each cell column. NaN and less than nothing count as nothing.

    A cell in which two layers meet is split between them; of three, the two largest are seen. A column that is not nothing
    is seen, however little it is. What lies beyond ``top`` is left out.
    """
    plot_stacks(canvas, [Pile(0, canvas.height, layers, top)])


def plot_stacks(canvas: Canvas, piles: Sequence[Pile]) -> None:
    """Several stacks under one another, all at once: that costs hardly more than one of them."""
    piles = [pile for pile in piles if pile.rows and pile.layers]
    if not canvas.width or not piles:
        return
    which = np.repeat(np.arange(len(piles)), [pile.rows for pile in piles])
    place = np.concatenate([np.arange(pile.row, pile.row + pile.rows) for pile in piles])
    floor = np.concatenate([np.arange(8 * pile.rows - 8, -8, -8, dtype=np.int16) for pile in piles])
    upto = np.minimum(np.maximum(_compute_edges(canvas.width, piles)[:, which] - floor[:, None], 0), 8)
    covers, filled = upto[1:] - upto[:-1], upto[-1]
    most, largest = covers[0], np.zeros(filled.shape, np.intp)
    for layer in range(1, len(covers)):  # much faster than argmax is across rows
        largest[covers[layer] > most] = layer
        most = np.maximum(most, covers[layer])
    styles = _map_layers(piles, canvas.number_style, np.int16)
    numbers = styles[which[:, None], largest]
    if not canvas.glyphs.smooth:
        letters = _map_layers(piles, lambda style: ord(canvas.glyphs.find_part(style)), np.uint32)[which[:, None], largest]
        there = filled >= 4
        canvas.characters[place] = np.where(there, letters, canvas.characters[place])
        canvas.fore[place] = np.where(there, numbers, canvas.fore[place])
        return
    characters, fore, back = canvas.characters[place], canvas.fore[place], canvas.back[place]
    some = filled > 0
    back = np.where(some & (filled < 8), choose_visible(characters, fore, back), back)
    characters, fore = np.where(some, EIGHTHS[filled], characters), np.where(some, numbers, fore)
    if len(covers) > 1:
        meeting = np.flatnonzero((filled == 8) & (most < 8))
        lower, upper, eighths = _split_cells(covers.reshape(len(covers), -1)[:, meeting])
        whose = which[meeting // canvas.width]
        characters.ravel()[meeting] = EIGHTHS[eighths]
        fore.ravel()[meeting], back.ravel()[meeting] = styles[whose, lower], styles[whose, upper]
    canvas.characters[place], canvas.fore[place], canvas.back[place] = characters, fore, back


def _map_layers(piles: Sequence[Pile], get_value: Callable[[str], int], kind: type[np.integer]) -> NDArray[np.integer]:
    """Something of each layer's style, shape (piles, layers)."""
    most = max(len(pile.layers) for pile in piles)
    return np.array(
        [[*(get_value(style) for style, _ in pile.layers), *[0] * (most - len(pile.layers))] for pile in piles], kind
    )


def _compute_edges(width: int, piles: Sequence[Pile]) -> Eighths:
    """Where layers end, in eighths of a cell from below, shape (layers + 1, piles, width); the first are the ground."""
    amounts = np.zeros((1 + max(len(pile.layers) for pile in piles), len(piles), width))
    for place, pile in enumerate(piles):
        for row, (_, values) in zip(amounts[1:, place], pile.layers, strict=False):
            row[: len(values)] = values[:width]
    amounts = np.fmin(np.fmax(amounts, 0.0), 1e300)
    tops, sizes = np.array([(pile.top, 8 * pile.rows) for pile in piles]).T[:, :, None]
    with np.errstate(all="ignore"):
        sums = np.minimum(amounts.cumsum(axis=0), 1e300)
        places = np.minimum(np.fmax(sums / tops * sizes, 0), sizes)
    edges: Eighths = np.rint(places).astype(np.int16)
    little = (edges[-1] == 0) & (sums[-1] > 0)
    if little.any():
        here = amounts[1:, little]
        edges[1:, little] = np.cumsum(here == here.max(axis=0), axis=0) > 0
    return edges


def _split_cells(covers: Eighths) -> tuple[Ints, Ints, Ints]:
    """Of full cells in which layers meet: the lower and the upper one of the two largest, and the lower one's eighths."""
    cells = np.arange(covers.shape[1])
    one = covers.argmax(axis=0)
    rest = covers.copy()
    rest[one, cells] = 0
    other = rest.argmax(axis=0)
    lower, upper = np.minimum(one, other), np.maximum(one, other)
    sizes = covers[lower, cells], covers[upper, cells]
    return lower, upper, np.rint(sizes[0] * 8 / (sizes[0] + sizes[1])).astype(np.int64)


def plot_band(
    canvas: Canvas, low: Numbers, high: Numbers, style: str, *, top: float, bottom: float = 0.0, letter: str = ":"
) -> None:
    """Fills between two values of each cell column: quantiles behind a line. NaN leaves a column empty.

    Args:
        letter: what it is made of where cells have no colours of their own behind them.
    """
    if not canvas.width or not canvas.height:
        return
    begin, end = _compute_band(canvas, low, high, bottom, top)
    floor = (8 * np.arange(canvas.height - 1, -1, -1))[:, None]
    lower, upper = np.clip(begin - floor, 0, 8), np.clip(end - floor, 0, 8)
    number = canvas.number_style(style)
    if not canvas.glyphs.smooth:
        there = upper - lower >= 4
        canvas.characters[:] = np.where(there, np.uint32(ord(letter)), canvas.characters)
        canvas.fore[:] = np.where(there, np.int16(number), canvas.fore)
        return
    behind = canvas.find_visible()
    full = (lower == 0) & (upper == 8)
    from_below = (lower == 0) & (upper > 0) & ~full
    from_above = (lower > 0) & (lower < 8) & (upper == 8)
    within = (lower > 0) & (upper < 8) & (upper > lower)
    thin = np.where(lower >= 5, _UPPER, np.where(upper <= 3, _LOWER, _MIDDLE))
    canvas.characters[:] = np.select(
        [full, from_below, from_above, within], [SPACE, EIGHTHS[upper], EIGHTHS[lower], thin], canvas.characters
    ).astype(np.uint32)
    ground = np.where(behind > 0, behind, canvas.number_style("ground"))
    blocks = from_below | within
    canvas.fore[:] = np.select([blocks, from_above], [np.int16(number), ground], canvas.fore).astype(np.int16)
    canvas.back[:] = np.select([full | from_above, blocks], [np.int16(number), behind], canvas.back).astype(np.int16)


def _compute_band(canvas: Canvas, low: Numbers, high: Numbers, bottom: float, top: float) -> tuple[Ints, Ints]:
    """Begin and end of the band in eighths from below; at least one eighth where it is known, (0, 0) where it is not."""
    values = np.full((2, canvas.width), np.nan)
    for row, given in zip(values, (low, high), strict=True):
        row[: len(given)] = given[: canvas.width]
    places = scale_heights(values, bottom, top, 8 * canvas.height)
    known = ~np.isnan(places).any(axis=0)
    eighths = np.rint(np.nan_to_num(places)).astype(np.int64)
    begin = np.minimum(eighths.min(axis=0), 8 * canvas.height - 1)
    return np.where(known, begin, 0), np.where(known, np.maximum(eighths.max(axis=0), begin + 1), 0)
