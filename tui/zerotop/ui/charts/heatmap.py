"""Cells coloured by a code: ribbons (a phase for each time interval) and heatmaps."""

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


def plot_ribbon(canvas: Canvas, codes: Codes, styles: Sequence[str], *, row: int = 0, rows: int = 1) -> None:
    """Colour ``rows`` rows of cells from ``row`` on by ``styles[code]``; a negative code leaves a cell empty.

    ``codes`` has one code for each column, or two: then a cell is split into a left and a right half. Its shape is
    (columns,), which repeats in all rows, or (rows, columns).
    """
    width = canvas.width
    if not width or row >= canvas.height or not styles:
        return
    halves = codes.shape[-1] > width
    codes = np.where((codes >= 0) & (codes < len(styles)), codes, -1)[..., : 2 * width if halves else width]
    if halves and codes.shape[-1] % 2:
        codes = np.concatenate((codes, np.full_like(codes[..., :1], -1)), axis=-1)
    left, right = (codes[..., 0::2], codes[..., 1::2]) if halves else (codes, codes)
    if not canvas.glyphs.smooth:
        right = left = np.where(left < 0, right, left)
    _plot_halves(canvas, left, right, styles, (slice(row, row + rows), slice(0, left.shape[-1])), _LEFT_HALF)


def plot_heatmap(canvas: Canvas, levels: Codes, *, halves: bool = False) -> None:
    """Colour cells by level, 0 to 9 (see :func:`compute_levels`); a negative level leaves a cell empty.

    Args:
        levels: shape (rows, columns), the uppermost row first.
        halves: a cell holds two rows of levels; where cells cannot be split it shows the higher of both.
    """
    levels = levels[: 2 * canvas.height if halves else canvas.height, : canvas.width]
    if not levels.size:
        return
    levels = np.where((levels >= 0) & (levels < len(HEAT)), levels, -1)
    if halves and len(levels) % 2:
        levels = np.concatenate((levels, np.full((1, levels.shape[1]), -1)))
    upper, lower = (levels[0::2], levels[1::2]) if halves else (levels, levels)
    if not canvas.glyphs.smooth:
        upper = lower = np.maximum(upper, lower)
    _plot_halves(canvas, upper, lower, HEAT, (slice(0, len(upper)), slice(0, upper.shape[1])), _UPPER_HALF)


def compute_levels(values: Numbers, low: float, high: float) -> NDArray[np.int64]:
    """Return levels 0 to 9 of equal size between ``low`` and ``high``; -1 for NaN."""
    values = np.asarray(values, np.float64)
    if not high > low:
        return np.where(np.isnan(values), -1, 0).astype(np.int64)
    with np.errstate(all="ignore"):
        share = np.clip((values - low) / (high - low), 0.0, 1.0)
    return np.where(np.isnan(share), -1, np.minimum(np.nan_to_num(share) * len(HEAT), len(HEAT) - 1)).astype(np.int64)


def _plot_halves(
    canvas: Canvas, first: Codes, second: Codes, styles: Sequence[str], cells: tuple[slice, slice], half: int
) -> None:
    """Colour ``cells``, each divided in two by the character ``half``, which fills the first half."""
    numbers = np.array([canvas.number_style(style) for style in styles], np.int16)
    first_styles, second_styles = np.where(first >= 0, numbers[first], 0), np.where(second >= 0, numbers[second], 0)
    same = first == second
    # Without a first half, the mirrored block is drawn; otherwise the second half is the background.
    mirrored = (first < 0) & ~same
    mirrored_half = ord("▐") if half == _LEFT_HALF else ord("▄")
    characters = np.where(
        same, _list_characters(canvas, styles)[np.maximum(first, 0)], np.where(mirrored, mirrored_half, half)
    )
    canvas.characters[cells] = np.where((first >= 0) | (second >= 0), characters, SPACE)
    canvas.fore[cells] = np.where(mirrored, second_styles, first_styles)
    canvas.back[cells] = np.where(same | mirrored | (second < 0), canvas.back[cells], second_styles)


def _list_characters(canvas: Canvas, styles: Sequence[str]) -> NDArray[np.uint32]:
    """Return the character of a whole cell of each style."""
    if canvas.glyphs.smooth:
        return np.full(len(styles), FULL, np.uint32)
    heat = _HEAT_ASCII if canvas.glyphs.name == "ascii" else _HEAT_PLAIN
    letters = [heat[HEAT.index(style)] if style in HEAT else canvas.glyphs.find_part(style) for style in styles]
    return np.array([ord(letter) for letter in letters], np.uint32)
