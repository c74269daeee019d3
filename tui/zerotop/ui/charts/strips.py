"""Strips: a value over the last while, a column of cells for each piece of time, the newest at the right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.live_view import Floats, GpuHistory, RankHistory
from zerotop.ui.drawing.formatting import format_rough_time
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style
from zerotop.ui.drawing.rows import Row, Span, merge_spans

GROUND_STYLE = "strip"  # the style of what is behind


def draw_strip(
    values: Sequence[float] | Floats, styles: Sequence[str], top: float, width: int, height: int, glyphs: Glyphs
) -> list[Row]:
    """``height`` rows, the uppermost first, of the last ``width`` values on a scale from 0 to ``top``.

    Values without a number leave their column empty. The uppermost row is never quite full, so that strips under one another
    stay apart.
    """
    shown = min(width, len(values))
    eighths = _compute_eighths(np.asarray(values[len(values) - shown :], np.float64), top, height).tolist()
    return list(_draw_rows(tuple(zip(eighths, styles[len(styles) - shown :], strict=True)), width, height, glyphs))


@lru_cache(maxsize=256)  # most frames bring no new piece of time
def _draw_rows(columns: tuple[tuple[int, str], ...], width: int, height: int, glyphs: Glyphs) -> tuple[Row, ...]:
    """The rows of columns of so many eighths of a cell and their style."""
    lead: Span = (" " * (width - len(columns)), _add_ground("text", glyphs))
    return tuple(
        merge_spans([lead, *(_draw_cell(eighths - 8 * row, style, row == height - 1, glyphs) for eighths, style in columns)])
        for row in reversed(range(height))
    )


def _compute_eighths(values: Floats, top: float, height: int) -> NDArray[np.int64]:
    """How high values are drawn; something that is not nothing is seen."""
    some = (values > 0) & (0 < top < math.inf)
    heights = np.rint(np.minimum(values[some], top) / top * (height * 8 - 1))
    found = np.zeros(len(values), np.int64)
    found[some] = np.maximum(1, heights)
    return found


def _draw_cell(eighths: int, style: str, uppermost: bool, glyphs: Glyphs) -> Span:
    if eighths <= 0:
        return " ", _add_ground("text", glyphs)
    if eighths >= 8 and not uppermost:
        return glyphs.levels[8], _add_ground(style, glyphs)
    return glyphs.levels[min(7, eighths)], _add_ground(style, glyphs)


def _add_ground(style: str, glyphs: Glyphs) -> str:
    return f"{style}/{GROUND_STYLE}" if glyphs.smooth else style


@lru_cache(maxsize=256)
def draw_cores_strip(history: RankHistory, top: float, width: int, height: int, glyphs: Glyphs) -> tuple[Row, ...]:
    """A rank's cores in use, in the colours of the phases it was in."""
    begin = max(0, len(history.phase) - width)
    styles = [phase_style(phase) for phase in history.phase[begin:]]
    return tuple(draw_strip(history.cores_used[begin:], styles, top, width, height, glyphs))


@lru_cache(maxsize=256)
def draw_utilization_strip(history: GpuHistory, width: int, height: int, glyphs: Glyphs) -> tuple[Row, ...]:
    """A GPU's utilization."""
    values = history.utilization_percent[max(0, len(history.utilization_percent) - width) :]
    return tuple(draw_strip(values, ["load"] * len(values), 100.0, width, height, glyphs))


def draw_empty_strip(width: int, height: int, glyphs: Glyphs) -> tuple[Row, ...]:
    """Where nothing was recorded."""
    return tuple(draw_strip((), (), 1.0, width, height, glyphs))


def draw_strip_heading(piece_s: float, width: int) -> Row:
    """What a strip is: ``last 24 s``, as far as it reaches; nothing where there is no room to say it."""
    text = f"last {format_rough_time(width * piece_s)}"
    return ((text, "heading"),) if len(text) <= width else ()
