"""Of a search: the memory available to PyTorch, and the lines of the series beyond their runs up to it."""

from __future__ import annotations

import numpy as np

from zerotop.analysis.formatting import format_bytes
from zerotop.recording.samples import Floats
from zerotop.ui.charts import Canvas, plot_line
from zerotop.ui.sweep.model import SweepModel

_LIMIT_STYLE = "warn"
_DOT_SPACING = 3  # dot columns


def find_limit(model: SweepModel) -> float | None:
    """Return the memory available to PyTorch on one GPU, in bytes; None if no search knows."""
    results = model.search.results if model.search is not None else ()
    return next((one.limit_bytes for one in reversed(results) if one.limit_bytes is not None), None)


def plot_search(canvas: Canvas, model: SweepModel, values: Floats, limit: float, top: float) -> None:
    """Draw the limit and the lines. ``values`` of the axis: shape (``canvas.dot_columns``,)."""
    level = np.full(canvas.dot_columns, limit)
    plot_line(canvas, level, level, _LIMIT_STYLE, top=top)
    spaced = np.arange(canvas.dot_columns) % _DOT_SPACING == 0
    for result in model.search.results if model.search is not None else ():
        if result.line is None:
            continue
        sizes = result.line.slope * values + result.line.intercept
        sizes[~spaced | (sizes > limit)] = np.nan
        plot_line(canvas, sizes, sizes, model.find_style(result.settings), top=top)


def name_limit(canvas: Canvas, limit: float, top: float) -> None:
    """Write the limit below its line at the left, where lines that rise are still low."""
    row = canvas.height - 1 - min(canvas.height - 1, int(limit / top * canvas.height))
    canvas.write_text(1, row + 1, f"available to PyTorch: {format_bytes(limit)}", _LIMIT_STYLE)
