"""Memory over the last while, as a chart under the bars."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from zerotop.analysis.live_view import Floats, Gpu, GpuHistory, History, LiveView
from zerotop.ui.charts.stacked_columns import draw_stacked_column
from zerotop.ui.charts.step_axis import LABEL_WIDTH, Scale, choose_memory_scale, draw_axis_labels, draw_grid_row
from zerotop.ui.drawing.formatting import format_rough_time
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, fit_row, merge_spans

MIN_HEIGHT = 5

Layer = tuple[str, tuple[float, ...]]  # style, bytes of this layer alone in each piece


def draw_history(view: LiveView, name: str, gpu: Gpu | None, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """The chart with its axes, of a GPU or of all ranks' host memory. ``name`` says whose it is."""
    if gpu is not None:
        history = view.history.gpus.get((gpu.host, gpu.index))
        layers = () if history is None else _build_gpu_layers(history)
        least = max(gpu.reserved_peak_bytes or 0, gpu.used_bytes)
    else:
        layers = _build_host_layers(view.history)
        least = sum(rank.rss_peak_bytes for rank in view.ranks)
    room = max(0, width - LABEL_WIDTH - 1)
    shown = tuple((style, amounts[max(0, len(amounts) - room) :]) for style, amounts in layers)
    highest = max(map(sum, zip(*(amounts for _, amounts in shown), strict=True)), default=0.0)
    scale = choose_memory_scale(max(least, highest), height - 1)
    return [*_draw_chart(shown, scale, width, height - 1, glyphs), _draw_time_axis(view.history, name, width, glyphs)]


def _replace_missing(values: Floats) -> Floats:
    """What was not recorded is nothing to draw."""
    return np.nan_to_num(values, nan=0.0, posinf=0.0)


@lru_cache(maxsize=16)
def _build_gpu_layers(history: GpuHistory) -> tuple[Layer, ...]:
    allocated = _replace_missing(history.allocated_bytes)
    reserved = np.maximum(_replace_missing(history.reserved_bytes), allocated)
    used = np.maximum(_replace_missing(history.used_bytes), reserved)
    return (
        ("memory-allocated", tuple(allocated.tolist())),
        ("memory-reserved", tuple((reserved - allocated).tolist())),
        ("memory-other", tuple((used - reserved).tolist())),
    )


@lru_cache(maxsize=16)
def _build_host_layers(history: History) -> tuple[Layer, ...]:
    ranks = list(history.ranks.values())
    if not ranks:
        return ()
    shared = sum((_replace_missing(rank.shared_bytes) for rank in ranks), np.zeros(len(ranks[0].shared_bytes)))
    resident = sum((_replace_missing(rank.rss_bytes) for rank in ranks), np.zeros(len(shared)))
    own = np.maximum(0.0, resident - shared)
    return ("memory-allocated", tuple(own.tolist())), ("memory-reserved", tuple(shared.tolist()))


@lru_cache(maxsize=8)
def _draw_chart(layers: tuple[Layer, ...], scale: Scale, width: int, height: int, glyphs: Glyphs) -> tuple[Row, ...]:
    """The chart's rows with the axis at their left."""
    room = max(0, width - LABEL_WIDTH - 1)
    count = len(layers[0][1]) if layers else 0
    above = height - scale.count_plot_rows(height)
    columns = [
        draw_stacked_column(
            tuple((style, amounts[place]) for style, amounts in layers), scale.highest, height - above, glyphs
        )
        for place in range(count)
    ]
    lead: Span = (" " * (room - count), "text")
    ticks = scale.tick_rows(height)
    rows: list[Row] = []
    for row, label in enumerate(draw_axis_labels(scale, height, glyphs)):
        cells = merge_spans([lead, *(column[row - above] for column in columns)] if row >= above else ())
        rows.append(fit_row((*label, *(draw_grid_row(cells, room, glyphs) if row in ticks else cells)), width, glyphs))
    return tuple(rows)


def _draw_time_axis(history: History, name: str, width: int, glyphs: Glyphs) -> Row:
    room = width - LABEL_WIDTH - 1
    begin = f" {format_rough_time(room * history.piece_s)} ago "
    end = " now"
    middle = f" {name} " if len(begin) + len(name) + len(end) + 2 <= room else ""
    line = glyphs.rule * max(0, room - len(begin) - len(middle) - len(end))
    return fit_row(
        (
            (" " * LABEL_WIDTH, "axis"),
            (glyphs.corner, "rule"),
            (begin, "axis"),
            (line[: len(line) // 2], "rule"),
            (middle, "axis"),
            (line[len(line) // 2 :], "rule"),
            (end, "axis"),
        ),
        width,
        glyphs,
    )
