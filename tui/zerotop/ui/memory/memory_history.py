"""Memory over the last while, as a chart under the bars."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.live_view import Floats, Gpu, GpuHistory, History, LiveView
from zerotop.ui.charts import AXIS_WIDTH, Canvas, Scale, add_axes, choose_memory_scale, plot_grid, plot_stack
from zerotop.ui.charts.columns import Ints
from zerotop.ui.charts.strips import find_pieces
from zerotop.ui.drawing.formatting import format_rough_time, format_size
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_row

MIN_HEIGHT = 3

Layers = tuple[tuple[str, Floats], ...]  # style, bytes of this layer alone in each piece


def draw_history(view: LiveView, name: str, gpu: Gpu | None, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Draw the chart with its axes, for a GPU or the host memory of all ranks. ``name``: the owner in the title."""
    history: GpuHistory | History | None = view.history
    least = sum(rank.rss_peak_bytes for rank in view.ranks)
    if gpu is not None:
        history = view.history.gpus.get((gpu.host, gpu.index))
        least = max(gpu.reserved_peak_bytes or 0, gpu.used_bytes)
    room = max(0, width - AXIS_WIDTH)
    shown = min(room, view.history.length)
    highest = float(np.max(sum(amounts[-shown:] for _, amounts in _list_layers(history)), initial=0.0)) if shown else 0.0
    scale = choose_memory_scale(max(least, highest), height - 1)
    end = f" step {view.progress.step}" if view.is_last_step else " now"
    below = _draw_time_axis(shown * view.history.piece_s, name, end, room, glyphs)
    return [fit_row(row, width, glyphs) for row in _draw_chart(history, scale, below, shown, room, height - 1, glyphs)]


def describe_history(view: LiveView, gpu: Gpu | None, width: int, x: int) -> str:
    """Return the amounts at a column of the chart of this width; empty beside it and where nothing was recorded."""
    history = view.history.gpus.get((gpu.host, gpu.index)) if gpu is not None else view.history
    layers = _list_layers(history)
    if not AXIS_WIDTH <= x < width or not layers:
        return ""
    back = int(find_pieces(view.history.length, width - AXIS_WIDTH)[x - AXIS_WIDTH])
    if back >= len(layers[0][1]):
        return ""
    amounts = np.cumsum([amounts[-1 - back] for _, amounts in layers])
    names = ("allocated", "reserved", "used") if gpu is not None else ("own", "RSS")
    sizes = ", ".join(f"{name} {format_size(float(amount))}" for name, amount in zip(names, amounts, strict=True))
    ago = f"{format_rough_time(back * view.history.piece_s)} ago"
    if _find_gaps(history)[-1 - back]:
        return f"{ago}: not recorded"
    return f"{ago}: {sizes}" if amounts[-1] > 0 else ""


@lru_cache(maxsize=16)
def _list_layers(history: GpuHistory | History | None) -> Layers:
    """Return the stacked layers, from the bottom up; missing values are 0."""
    if isinstance(history, GpuHistory):
        allocated = np.nan_to_num(history.allocated_bytes, posinf=0.0)
        reserved = np.maximum(np.nan_to_num(history.reserved_bytes, posinf=0.0), allocated)
        used = np.maximum(np.nan_to_num(history.used_bytes, posinf=0.0), reserved)
        return ("memory-allocated", allocated), ("memory-reserved", reserved - allocated), ("memory-other", used - reserved)
    ranks = list(history.ranks.values()) if history is not None else []
    if not ranks:
        return ()
    shared = np.sum([np.nan_to_num(rank.shared_bytes, posinf=0.0) for rank in ranks], axis=0)
    resident = np.sum([np.nan_to_num(rank.rss_bytes, posinf=0.0) for rank in ranks], axis=0)
    return ("memory-allocated", np.maximum(0.0, resident - shared)), ("memory-reserved", shared)


@lru_cache(maxsize=16)
def _find_gaps(history: GpuHistory | History | None) -> NDArray[np.bool_]:
    """Return in which pieces nothing was recorded, though there was before and after them."""
    if isinstance(history, GpuHistory):
        amounts = [history.used_bytes, history.reserved_bytes, history.allocated_bytes]
    else:
        amounts = [rank.rss_bytes for rank in history.ranks.values()] if history is not None else []
    if not amounts:
        return np.zeros(0, np.bool_)
    known = ~np.asarray(np.isnan(amounts).all(axis=0))
    places = np.flatnonzero(known)
    gaps: NDArray[np.bool_] = ~known
    gaps[: places[0] if len(places) else None] = False
    gaps[places[-1] if len(places) else 0 :] = False
    return gaps


@lru_cache(maxsize=8)  # most frames bring no new sample
def _draw_chart(
    history: GpuHistory | History | None, scale: Scale, below: Row, shown: int, width: int, height: int, glyphs: Glyphs
) -> Sequence[Row]:
    """Draw the last ``shown`` pieces across the whole width."""
    canvas = Canvas(width, height, glyphs)
    rows = scale.count_plot_rows(height)
    back = find_pieces(shown, width)
    layers = [(style, _take_pieces(amounts, back)) for style, amounts in _list_layers(history)]
    plot_stack(canvas.slice_rows(height - rows, rows), layers, top=scale.uppermost)
    gaps = _take_pieces(_find_gaps(history).astype(np.float64), back) > 0
    canvas.characters[:, gaps], canvas.fore[:, gaps] = ord(glyphs.gap), canvas.number_style("rule")
    plot_grid(canvas, scale)
    return add_axes(canvas, scale, below)


def _take_pieces(amounts: Floats, back: Ints) -> Floats:
    """Return the amounts ``back`` pieces before the last one; 0 where there are fewer."""
    return np.where(back < len(amounts), np.append(amounts, 0.0)[np.maximum(len(amounts) - 1 - back, -1)], 0.0)


def _draw_time_axis(seconds: float, name: str, end: str, width: int, glyphs: Glyphs) -> Row:
    begin = f" {format_rough_time(seconds)} ago " if end == " now" else f" {format_rough_time(seconds)} before "
    middle = f" {name} " if len(begin) + len(name) + len(end) + 2 <= width else ""
    line = glyphs.rule * max(0, width - len(begin) - len(middle) - len(end))
    left, right = line[: len(line) // 2], line[len(line) // 2 :]
    return (begin, "axis"), (left, "rule"), (middle, "axis"), (right, "rule"), (end, "axis")
