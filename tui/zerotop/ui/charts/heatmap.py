"""Cells coloured by a code: ribbons (a phase for each piece of time) and heatmaps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zerotop.ui.charts.canvas import FULL, SPACE, Canvas
from zerotop.ui.charts.columns import Numbers

HEAT = tuple(f"heat-{level}" for level in range(10))  # styles of a heatmap, from the lowest to the highest
_HEAT_ASCII = ".:-=+*oO#@"
_HEAT_PLAIN = "·⡀⡄⡆⡇⣇⣧⣷⣿█"
_LEFT_HALF, _UPPER_HALF = ord("▌"), ord("▀")

Codes = NDArray[np.integer]


def plot_ribbon(canvas: Canvas, codes: Codes, styles: Sequence[str], *, row: int = 0, rows: int = 1, x: int = 0) -> None:
    """Colours cells by ``styles[code]``, ``rows`` rows of them from ``row`` on; a negative code leaves a cell empty.

    ``codes`` has one for each cell from column ``x`` on, or two: then a cell is split between a left and a right half. There
    may be several rows of them.
    """
    room = canvas.width - x
    if room <= 0 or row >= canvas.height or not styles:
        return
    halves = codes.shape[-1] > room
    codes = np.where((codes >= 0) & (codes < len(styles)), codes, -1)[..., : 2 * room if halves else room]
    if halves and codes.shape[-1] % 2:
        codes = np.concatenate((codes, np.full_like(codes[..., :1], -1)), axis=-1)
    left, right = (codes[..., 0::2], codes[..., 1::2]) if halves else (codes, codes)
    if not canvas.glyphs.smooth:
        right = left = np.where(left < 0, right, left)
    _plot_halves(canvas, left, right, styles, (slice(row, row + rows), slice(x, x + left.shape[-1])), _LEFT_HALF)


def plot_heatmap(
    canvas: Canvas, levels: Codes, *, row: int = 0, x: int = 0, halves: bool = False, styles: Sequence[str] = HEAT
) -> None:
    """Colours cells by level, 0 to 9 (see :func:`levels`), from (x, row) on; a negative one leaves a cell empty.

    Args:
        levels: shape (rows, columns), the uppermost row first.
        halves: a cell holds two rows of it. Where cells cannot be split it shows the higher of both.
    """
    room_x, room_y = canvas.width - x, canvas.height - row
    levels = levels[: 2 * room_y if halves else room_y, :room_x] if room_x > 0 and room_y > 0 else levels[:0]
    if not levels.size:
        return
    levels = np.where((levels >= 0) & (levels < len(styles)), levels, -1)
    if halves and len(levels) % 2:
        levels = np.concatenate((levels, np.full((1, levels.shape[1]), -1)))
    upper, lower = (levels[0::2], levels[1::2]) if halves else (levels, levels)
    if not canvas.glyphs.smooth:
        upper = lower = np.maximum(upper, lower)
    _plot_halves(canvas, upper, lower, styles, (slice(row, row + len(upper)), slice(x, x + upper.shape[1])), _UPPER_HALF)


def compute_levels(values: Numbers, low: float, high: float, *, count: int = len(HEAT)) -> NDArray[np.int64]:
    """Values as levels 0 to ``count`` - 1 of equal size between ``low`` and ``high``; -1 for NaN."""
    values = np.asarray(values, np.float64)
    if not high > low:
        return np.where(np.isnan(values), -1, 0).astype(np.int64)
    with np.errstate(all="ignore"):
        share = np.clip((values - low) / (high - low), 0.0, 1.0)
    return np.where(np.isnan(share), -1, np.minimum(np.nan_to_num(share) * count, count - 1)).astype(np.int64)


def choose_heat_letter(canvas_is_ascii: bool, level: int) -> str:
    """What a level looks like where there are no colours."""
    return (_HEAT_ASCII if canvas_is_ascii else _HEAT_PLAIN)[level]


def _plot_halves(
    canvas: Canvas, one: Codes, other: Codes, styles: Sequence[str], place: tuple[slice, slice], half: int
) -> None:
    """Colours the cells at ``place``, each divided in two by the character ``half``, which fills the first half."""
    numbers = np.array([canvas.number_style(style) for style in styles], np.int16)
    full = _choose_characters(canvas, styles)
    first, second = np.where(one >= 0, numbers[one], 0), np.where(other >= 0, numbers[other], 0)
    there = (one >= 0) | (other >= 0)
    same = one == other
    # With nothing in the first half, the other half's block is drawn; otherwise the second half is behind.
    mirrored = (one < 0) & ~same
    characters = np.where(same, full[np.maximum(one, 0)], np.where(mirrored, _mirror_block(half), half))
    canvas.characters[place] = np.where(there, characters, SPACE)
    canvas.fore[place] = np.where(mirrored, second, first)
    before = canvas.back[place]
    canvas.back[place] = np.where(same | mirrored | (other < 0), before, second)


def _mirror_block(half: int) -> int:
    return ord("▐") if half == _LEFT_HALF else ord("▄")


def _choose_characters(canvas: Canvas, styles: Sequence[str]) -> NDArray[np.uint32]:
    """The character of a whole cell of each style."""
    if canvas.glyphs.smooth:
        return np.full(len(styles), FULL, np.uint32)
    ascii_only = canvas.glyphs.name == "ascii"
    letters = [
        choose_heat_letter(ascii_only, HEAT.index(style)) if style in HEAT else canvas.glyphs.find_part(style)
        for style in styles
    ]
    return np.array([ord(letter) for letter in letters], np.uint32)
