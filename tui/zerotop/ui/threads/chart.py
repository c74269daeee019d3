"""The chart of the threads screen: a rank's cores and busy threads over time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zerotop.analysis.live_view import Floats
from zerotop.analysis.ranks.threads import RankThreads
from zerotop.ui.charts import (
    AXIS_WIDTH,
    Canvas,
    Kind,
    Scale,
    Watched,
    area,
    axis_row,
    framed,
    grid,
    line,
    mean,
    minmax,
    time_ticks,
)
from zerotop.ui.drawing.formatting import about, fixed
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style
from zerotop.ui.drawing.rows import Row, filled

_LETTER = "*"
_SERIES = "series-0"  # the line of busy threads
_AREA = "load"  # until it has the phases' colours


def draw_chart(
    threads: RankThreads, left: int, size: int, watched: Watched, begin_s: float, height: int, width: int, glyphs: Glyphs
) -> list[Row]:
    """Cores used, in the colours of the phases, and the number of busy threads as a line; time below.

    Its ``size`` columns begin at ``left``; before them are words.
    """
    used = _columns(threads, threads.cores_used, size)
    _, high = minmax(threads.time_s, threads.busy, threads.begin_s, threads.end_s, 2 * size, hold=0.5)
    highest = max(float(np.nanmax(values, initial=0.0)) for values in (used, high))
    canvas = Canvas(size, height - 1, glyphs)
    axis = watched.scale("cores", Kind.CORES, highest, canvas.height)
    grid(canvas, axis)
    _paint_phases(canvas, used, threads.phases, axis)
    line(canvas, high, high, _SERIES, top=axis.highest, letter=_LETTER)
    marks = time_ticks(threads.begin_s - begin_s, threads.end_s - begin_s, size)
    below = axis_row([(column, text) for column, text in marks if not text.startswith("-")], size, glyphs)
    left -= AXIS_WIDTH
    legend = [*_legend(threads, begin_s, left, glyphs), *[()] * height][:height]
    rows = framed(canvas, axis, below)
    return [filled((*filled(told, left, glyphs), *row), width, glyphs) for told, row in zip(legend, rows, strict=True)]


def _columns(threads: RankThreads, values: Floats, size: int) -> Floats:
    return mean(threads.time_s, values, threads.begin_s, threads.end_s, size, hold=0.5)


def _paint_phases(canvas: Canvas, used: Floats, phases: Sequence[str], axis: Scale) -> None:
    """Each column in the colour of the phase that its time was spent in."""
    styles = [phase_style(phase) for phase in phases]
    area(canvas, used, _AREA, top=axis.highest)
    painted = canvas.fore == canvas.number(_AREA)
    canvas.fore[painted] = np.broadcast_to([canvas.number(style) for style in styles], painted.shape)[painted]
    if not canvas.glyphs.smooth:
        letters = [ord(canvas.glyphs.part(style)) for style in styles]
        canvas.characters[painted] = np.broadcast_to(letters, painted.shape)[painted]


def _legend(threads: RankThreads, begin_s: float, width: int, glyphs: Glyphs) -> list[Row]:
    """What the chart shows, beside it."""
    rank = threads.rank
    kinds = list(dict.fromkeys(phase for phase in threads.phases if phase))
    styles = map(phase_style, kinds)
    named = [
        ((glyphs.sample(style), style), (f" {phase.replace('_', ' ')}", "muted"))
        for phase, style in zip(kinds, styles, strict=True)
    ]
    return [
        ((f"{glyphs.sample('load')} ", "load"), (f"{fixed(rank.cores_used, 1, 4)} cores", "text")),
        ((f"{glyphs.track if glyphs.smooth else _LETTER} ", _SERIES), (f"{rank.busy_threads:4d} busy", "text")),
        ((f"last {about(threads.end_s - max(threads.begin_s, begin_s))}", "muted"),),
        *([()] if named else []),
        *(tuple(row) for row in named if width >= 12),
    ]
