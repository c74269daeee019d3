"""The chart of the threads screen: a rank's cores and runnable threads over time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from zerotop.analysis.formatting import pluralize
from zerotop.analysis.live_view import Floats
from zerotop.analysis.ranks.threads import RankThreads
from zerotop.ui.charts import (
    AXIS_WIDTH,
    Canvas,
    GrowingScales,
    Scale,
    add_axes,
    choose_time_ticks,
    draw_axis,
    plot_area,
    plot_grid,
    plot_line,
    resample_mean,
)
from zerotop.ui.drawing.formatting import format_fixed, format_rough_time
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style, phase_word
from zerotop.ui.drawing.rows import Row, Span, fit_row
from zerotop.ui.drawing.table import PlacedColumns
from zerotop.ui.threads.phase_means import draw_phase_means, has_phase_means
from zerotop_probe.recording.metrics import CORES

_LETTER = "*"
_SHOWN_SHARE = 0.98  # of the runnable threads' columns: a few higher ones do not set the scale
_RUNNABLE_STYLE = "series-0"  # of the line of runnable threads
_CORES_STYLE = "load"  # replaced by the phases' colours


def draw_chart(
    threads: RankThreads,
    placed: PlacedColumns[Any],
    watched: GrowingScales,
    begin_s: float,
    height: int,
    width: int,
    glyphs: Glyphs,
) -> list[Row]:
    """Draw cores used, in the phases' colours, and the number of runnable threads as a line, over a time axis.

    The chart is above the second of the ``placed`` columns, which has the histories. The legend stands before it, and the
    phases with their means after it, where there is room.
    """
    (_, left, size) = placed.columns[1]
    used = resample_columns(threads, threads.cores_used, size)
    runnable = resample_columns(threads, threads.runnable, 2 * size)
    highest = float(np.nanquantile(np.append(runnable, 0.0), _SHOWN_SHARE))
    highest = max(highest, float(np.nanmax(used, initial=0.0)))
    canvas = Canvas(size, height - 1, glyphs)
    axis = watched.choose_scale("cores", CORES, highest, canvas.height)
    plot_grid(canvas, axis)
    _paint_phases(canvas, used, threads.phases, axis)
    plot_line(canvas, runnable, runnable, _RUNNABLE_STYLE, top=axis.highest, letter=_LETTER)
    marks = choose_time_ticks(threads.begin_s - begin_s, threads.end_s - begin_s, size)
    below = draw_axis([(column, text) for column, text in marks if not text.startswith("-")], size, glyphs)
    left -= AXIS_WIDTH
    has_means = has_phase_means(placed)
    legend = _draw_legend(threads, begin_s, left, glyphs, with_phases=not has_means)
    means = draw_phase_means(threads, placed, glyphs)
    texts = zip_longest(legend[:height], means[: height if has_means else 0], fillvalue=())
    rows = add_axes(canvas, axis, below)
    sides = [*texts, *[((), ())] * height]
    return [
        fit_row((*fit_row(text, left, glyphs), *row, *aside), width, glyphs)
        for row, (text, aside) in zip(rows, sides, strict=False)
    ]


def resample_columns(threads: RankThreads, values: Floats, size: int) -> Floats:
    """Return the mean of a rank's samples in each column of the chart, shape (size,)."""
    return resample_mean(threads.time_s, values, threads.begin_s, threads.end_s, size, hold=0.5)


def _paint_phases(canvas: Canvas, used: Floats, phases: Sequence[str], axis: Scale) -> None:
    """Paint each column in its phase's colour."""
    styles = [phase_style(phase) for phase in phases]
    plot_area(canvas, used, _CORES_STYLE, top=axis.highest)
    painted = canvas.fore == canvas.number_style(_CORES_STYLE)
    canvas.fore[painted] = np.broadcast_to([canvas.number_style(style) for style in styles], painted.shape)[painted]
    if not canvas.glyphs.smooth:
        letters = [ord(canvas.glyphs.find_part(style)) for style in styles]
        canvas.characters[painted] = np.broadcast_to(letters, painted.shape)[painted]


def _draw_legend(threads: RankThreads, begin_s: float, width: int, glyphs: Glyphs, *, with_phases: bool) -> list[Row]:
    """Return the chart's legend."""
    rank = threads.rank
    kinds = list(dict.fromkeys(phase for phase in threads.phases if phase)) if with_phases else []
    styles = map(phase_style, kinds)
    named = [
        ((glyphs.find_sample(style), style), (f" {phase_word(phase, glyphs)}", "muted"))
        for phase, style in zip(kinds, styles, strict=True)
    ]
    line: Span = (f"{glyphs.track if glyphs.smooth else _LETTER} ", _RUNNABLE_STYLE)
    figures: list[Row] = [
        ((f"{format_fixed(rank.cores_used, 1, 7)} used", "text"),),
        (line, (f"{format_fixed(rank.runnable_threads, 1, 5)} runnable", "text")),
        ((f"{rank.thread_count:7d} {pluralize(rank.thread_count, 'thread')}", "text"),),
    ]
    return [
        *(figures if rank.alive else [(line, ("runnable", "text"))]),
        ((f"chart: last {format_rough_time(threads.end_s - max(threads.begin_s, begin_s))}", "muted"),),
        *([()] if named else []),
        *(tuple(row) for row in named if width >= 12),
    ]
