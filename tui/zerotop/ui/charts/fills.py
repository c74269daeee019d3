"""Filled areas, stacks of layers and bands between two values, exact to an eighth of a cell."""

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


def plot_area(canvas: Canvas, values: Numbers, style: str, *, top: float) -> None:
    """Fill each column up to its value, shape (``canvas.width``,). NaN leaves a column empty."""
    plot_stack(canvas, [(style, values)], top=top)


class Pile(NamedTuple):
    """Stacked layers in some rows of a canvas; ``top`` is the value at the upper edge of these rows."""

    row: int
    rows: int
    layers: Sequence[Layer]
    top: float


def plot_stack(canvas: Canvas, layers: Sequence[Layer], *, top: float) -> None:
    """Stack layers upwards from 0, each with one amount for each column. NaN and negative amounts count as 0.

    A cell in which two layers meet is split between them; of three, the two largest are drawn. A column above zero has at
    least an eighth of a cell. Columns end at ``top``.
    """
    plot_stacks(canvas, [Pile(0, canvas.height, layers, top)])


def plot_stacks(canvas: Canvas, piles: Sequence[Pile]) -> None:
    """Draw several stacks at once, which costs hardly more than one of them."""
    piles = [pile for pile in piles if pile.rows and pile.layers]
    if not canvas.width or not piles:
        return
    pile_of_row = np.repeat(np.arange(len(piles)), [pile.rows for pile in piles])
    rows = np.concatenate([np.arange(pile.row, pile.row + pile.rows) for pile in piles])
    floor = np.concatenate([np.arange(8 * pile.rows - 8, -8, -8, dtype=np.int16) for pile in piles])
    edges = np.minimum(np.maximum(_compute_edges(canvas.width, piles)[:, pile_of_row] - floor[:, None], 0), 8)
    covers, filled = edges[1:] - edges[:-1], edges[-1]
    most, largest = covers[0], np.zeros(filled.shape, np.intp)
    for layer in range(1, len(covers)):  # much faster than argmax is across rows
        largest[covers[layer] > most] = layer
        most = np.maximum(most, covers[layer])
    styles = _map_layers(piles, canvas.number_style, np.int16)
    numbers = styles[pile_of_row[:, None], largest]
    if not canvas.glyphs.smooth:
        letters = _map_layers(piles, lambda style: ord(canvas.glyphs.find_part(style)), np.uint32)
        drawn = filled >= 4
        canvas.characters[rows] = np.where(drawn, letters[pile_of_row[:, None], largest], canvas.characters[rows])
        canvas.fore[rows] = np.where(drawn, numbers, canvas.fore[rows])
        return
    characters, fore, back = canvas.characters[rows], canvas.fore[rows], canvas.back[rows]
    drawn = filled > 0
    back = np.where(drawn & (filled < 8), choose_visible(characters, fore, back), back)
    characters, fore = np.where(drawn, EIGHTHS[filled], characters), np.where(drawn, numbers, fore)
    if len(covers) > 1:
        meeting = np.flatnonzero((filled == 8) & (most < 8))
        lower, upper, eighths = _split_cells(covers.reshape(len(covers), -1)[:, meeting])
        pile_of_cell = pile_of_row[meeting // canvas.width]
        characters.ravel()[meeting] = EIGHTHS[eighths]
        fore.ravel()[meeting], back.ravel()[meeting] = styles[pile_of_cell, lower], styles[pile_of_cell, upper]
    canvas.characters[rows], canvas.fore[rows], canvas.back[rows] = characters, fore, back


def _map_layers(piles: Sequence[Pile], get_value: Callable[[str], int], kind: type[np.integer]) -> NDArray[np.integer]:
    """Return a number for the style of each layer, shape (piles, layers)."""
    most = max(len(pile.layers) for pile in piles)
    return np.array(
        [[*(get_value(style) for style, _ in pile.layers), *[0] * (most - len(pile.layers))] for pile in piles], kind
    )


def _compute_edges(width: int, piles: Sequence[Pile]) -> Eighths:
    """Return where layers end, in eighths of a cell from below: shape (layers + 1, piles, width), the first one all 0."""
    amounts = np.zeros((1 + max(len(pile.layers) for pile in piles), len(piles), width))
    for index, pile in enumerate(piles):
        for row, (_, values) in zip(amounts[1:, index], pile.layers, strict=False):
            row[: len(values)] = values[:width]
    amounts = np.fmin(np.fmax(amounts, 0.0), 1e300)
    tops, sizes = np.array([(pile.top, 8 * pile.rows) for pile in piles]).T[:, :, None]
    with np.errstate(all="ignore"):
        sums = np.minimum(amounts.cumsum(axis=0), 1e300)
        heights = np.minimum(np.fmax(sums / tops * sizes, 0), sizes)
    edges: Eighths = np.rint(heights).astype(np.int16)
    tiny = (edges[-1] == 0) & (sums[-1] > 0)
    if tiny.any():
        parts = amounts[1:, tiny]
        edges[1:, tiny] = np.cumsum(parts == parts.max(axis=0), axis=0) > 0
    return edges


def _split_cells(covers: Eighths) -> tuple[Ints, Ints, Ints]:
    """Return, for full cells in which layers meet, the lower and upper of the two largest layers and the lower's eighths."""
    cells = np.arange(covers.shape[1])
    largest = covers.argmax(axis=0)
    rest = covers.copy()
    rest[largest, cells] = 0
    second = rest.argmax(axis=0)
    lower, upper = np.minimum(largest, second), np.maximum(largest, second)
    sizes = covers[lower, cells], covers[upper, cells]
    return lower, upper, np.rint(sizes[0] * 8 / (sizes[0] + sizes[1])).astype(np.int64)


def plot_band(canvas: Canvas, low: Numbers, high: Numbers, style: str, *, top: float) -> None:
    """Fill between two values of each column, such as quantiles behind a line. NaN leaves a column empty."""
    if not canvas.width or not canvas.height:
        return
    begin, end = _compute_band(canvas, low, high, top)
    floor = (8 * np.arange(canvas.height - 1, -1, -1))[:, None]
    lower, upper = np.clip(begin - floor, 0, 8), np.clip(end - floor, 0, 8)
    number = canvas.number_style(style)
    if not canvas.glyphs.smooth:
        drawn = upper - lower >= 4
        canvas.characters[:] = np.where(drawn, np.uint32(ord(":")), canvas.characters)
        canvas.fore[:] = np.where(drawn, np.int16(number), canvas.fore)
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


def _compute_band(canvas: Canvas, low: Numbers, high: Numbers, top: float) -> tuple[Ints, Ints]:
    """Return begin and end of the band in eighths from below: at least one eighth high, (0, 0) for NaN."""
    values = np.full((2, canvas.width), np.nan)
    for row, source in zip(values, (low, high), strict=True):
        row[: len(source)] = source[: canvas.width]
    heights = scale_heights(values, top, 8 * canvas.height)
    known = ~np.isnan(heights).any(axis=0)
    eighths = np.rint(np.nan_to_num(heights)).astype(np.int64)
    begin = np.minimum(eighths.min(axis=0), 8 * canvas.height - 1)
    return np.where(known, begin, 0), np.where(known, np.maximum(eighths.max(axis=0), begin + 1), 0)
