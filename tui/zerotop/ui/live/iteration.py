"""Time per step as stacked columns of phases, the newest step at the right."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from zerotop.analysis.live_view import Floats, Iterations, LastLoss, LiveView
from zerotop.ui.charts import AXIS_WIDTH, Canvas, Scale, add_axes, choose_time_scale, draw_step_axis, plot_grid, plot_stack
from zerotop.ui.charts.canvas import SPACE
from zerotop.ui.drawing.formatting import format_fixed
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import ITERATION_PHASES, find_phases, phase_style, phase_word
from zerotop.ui.drawing.rows import Row, fit_height, fit_row, row_width
from zerotop.ui.drawing.table import draw_rule, panel_title

LEGEND_WIDTH, _WIDE_LEGEND = 17, 27  # the wide one has room for whole names
# Steps from the end among which the legend looks for one with phases.
_FAR_STEPS = 32
_WIDE_FROM = 76  # cells of the panel
_LONGEST_S = 1e300  # a longer iteration is not drawn to scale
_MAX_STEP_WIDTH = 12  # cells of a step
_OLD_LOSS_WIDTH = 29  # cells of a loss with its step
_PLANNED_STEPS = (16, 24, 32, 48, 64, 96, 128, 192, 256)  # of a run whose length is unknown


def draw_iteration(
    view: LiveView,
    width: int,
    height: int,
    glyphs: Glyphs,
    *,
    focused: bool = False,
    marks: Mapping[int, str] | None = None,
    pointed: int | None = None,
) -> list[Row]:
    """Draw the title, the chart, and beside it a legend with the values of the ``pointed`` step, else of the last one.

    ``marks`` maps steps to the style of a mark above their column.
    """
    if height >= 4 and len(view.iterations.step):
        return _draw_chart(view, width, height, glyphs, focused, marks or {}, pointed)
    rows = [_draw_title(panel_title("Iteration", focused), view.loss, width, glyphs)]
    if height > 1 and not len(view.iterations.step):
        text = "no step was recorded" if view.job.state.is_over else "no step finished yet"
        rows.append(fit_row(((f"  {text}", "muted"),), width, glyphs))
    return fit_height(rows, width, height, glyphs)


class _Layout(NamedTuple):
    """The horizontal layout of the panel, in cells."""

    legend: int  # 0 for none
    chart: int
    step: int
    shown: slice  # of the steps


def _layout_chart(view: LiveView, width: int) -> _Layout:
    count = len(view.iterations.step)
    legend = _WIDE_LEGEND if width >= _WIDE_FROM else LEGEND_WIDTH if width >= 36 else 0
    chart = max(1, width - (legend + 2 if legend else 0) - AXIS_WIDTH)
    step = _choose_step_width(view.progress.total_steps, count, chart)
    return _Layout(legend, chart, step, slice(max(0, count - chart // step), count))


def find_step_at(view: LiveView, width: int, x: int) -> int | None:
    """Return the step whose column is at a cell of a panel of this width; None beside the columns."""
    layout, steps = _layout_chart(view, width), view.iterations.step
    cell = x - AXIS_WIDTH
    shown = steps[layout.shown]
    return int(shown[cell // layout.step]) if 0 <= cell < len(shown) * layout.step else None


def _draw_chart(
    view: LiveView,
    width: int,
    height: int,
    glyphs: Glyphs,
    focused: bool,
    marks: Mapping[int, str],
    pointed: int | None,
) -> list[Row]:
    iterations = view.iterations
    legend_width, chart_width, step_width, shown = _layout_chart(view, width)
    canvas = Canvas(chart_width, height - 2, glyphs)
    # Steps to the left of the chart count too, so that the scale does not change with each step that leaves it.
    scale = choose_time_scale(iterations.iteration_s[-4 * canvas.width // step_width :], canvas.height)
    _plot_steps(canvas, iterations, shown, scale, step_width, marks)
    steps = iterations.step[shown].tolist()
    begins = range(0, len(steps) * step_width, step_width)
    chart = add_axes(canvas, scale, draw_step_axis(steps, begins, canvas.width, glyphs))
    legend = _draw_legend(view, pointed, scale, legend_width, canvas.height, glyphs) if legend_width else []
    whose = f" on rank {iterations.rank}" if iterations.rank is not None else ""
    title: Row = (*panel_title(f"Iteration {scale.unit}", focused), (whose, "muted"))
    if view.loss is not None and view.loss.step is not None and view.loss.step < int(iterations.step[-1]) - 1:
        # Where there is no room for both, the step of an old loss rather than the rank.
        title = title if width >= row_width(title) + _OLD_LOSS_WIDTH else title[:-1]
    rows = [_draw_title(title, view.loss, width, glyphs)]
    rows += [fit_row((*row, ("  ", "text"), *entry), width, glyphs) for row, entry in zip(chart, legend, strict=False)]
    return rows + [fit_row(row, width, glyphs) for row in chart[len(legend) :]]


def _draw_title(title: Row, loss: LastLoss | None, width: int, glyphs: Glyphs) -> Row:
    """Draw the title, and at the right the trend of the loss, its last value and the step of it, as far as there is room."""
    if loss is None:
        return draw_rule(title, width, glyphs)
    value = "NaN" if math.isnan(loss.value) else f"{loss.value:.4g}"
    figure: Row = ((" loss ", "label"), (value, "value" if math.isfinite(loss.value) else "alert"))
    step: Row = ((f" at step {loss.step}", "muted"),) if loss.step is not None else ()
    trend: Row = ((" " + _draw_trend(loss.trend, glyphs), "accent"),) if len(loss.trend) > 1 else ()
    room = width - row_width(title) - 3
    for right in ((*trend, *figure, *step), (*figure, *step), figure):
        if row_width(right) <= room:
            return (*draw_rule(title, width - row_width(right), glyphs), *right)
    return draw_rule(title, width, glyphs)


def _draw_trend(trend: tuple[float, ...], glyphs: Glyphs) -> str:
    """Draw a cell for each value, from the lowest to the highest of them; a blank one for NaN."""
    known = [value for value in trend if not math.isnan(value)]
    lowest, extent = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    levels = glyphs.levels[1:]
    shares = [(value - lowest) / extent if extent > 0 else 0.0 for value in trend]
    return "".join(" " if math.isnan(share) else levels[round(share * (len(levels) - 1))] for share in shares)


def _choose_step_width(total: int | None, count: int, room: int) -> int:
    """Return the cells for each step: more than one only if the whole run fits, so that it is rarely rescaled.

    ``total``: the planned steps; if unknown, somewhat more than the ``count`` so far.
    """
    planned = total or next((steps for steps in _PLANNED_STEPS if steps >= count), room)
    return max(1, min(_MAX_STEP_WIDTH, room // planned))


def _plot_steps(
    canvas: Canvas, iterations: Iterations, shown: slice, scale: Scale, step_width: int, marks: Mapping[int, str]
) -> None:
    """Plot the columns of the shown steps, with marks on those that are missing, too tall, skipped or in ``marks``.

    The phases of a column that is too tall keep their shares of it.
    """
    glyphs, plot_rows = canvas.glyphs, scale.count_plot_rows(canvas.height)
    spare = canvas.height - plot_rows
    plot = canvas.slice_rows(spare, plot_rows)
    column_width = step_width - (step_width > 2)
    drawn = np.arange(step_width) < column_width  # of the cells of a step; the last one may be a gap
    shrink = scale.uppermost / np.clip(iterations.iteration_s[shown], scale.uppermost, _LONGEST_S)
    layers = [
        (phase_style(name), np.where(drawn, (np.minimum(seconds, _LONGEST_S) * shrink)[:, None], 0.0).ravel())
        for name, seconds in _list_phases(iterations, shown).items()
    ]
    plot_stack(plot, layers, top=scale.uppermost)
    steps, skipped = iterations.step[shown].tolist(), iterations.skipped[shown].tolist()
    too_tall = (iterations.iteration_s[shown] > scale.uppermost * 1.001).tolist()
    missing = np.isnan(iterations.iteration_s[shown]).tolist()
    for index, step in enumerate(steps):
        x = index * step_width + (column_width - 1) // 2
        if missing[index]:
            canvas.write_mark(x, canvas.height - 1, glyphs.missing, "muted")
        if too_tall[index]:
            canvas.write_mark(x, spare, glyphs.clipped, "clipped")
        if skipped[index]:
            blank = np.flatnonzero(canvas.characters[:, x] == SPACE)
            y = int(blank[-1]) if len(blank) else 0
            canvas.write_mark(x, y, glyphs.skipped, "warn" if len(blank) else "skipped")
        if step in marks:
            canvas.write_mark(x, 0, glyphs.marked, marks[step])
    plot_grid(canvas, scale)


def _list_phases(iterations: Iterations, shown: slice) -> dict[str, Floats]:
    """Return the seconds of each phase of the shown steps, in drawing order; 0 if not recorded."""
    zeros = np.zeros(len(iterations.step[shown]))
    seconds = {name: np.fmax(0.0, values[shown]) for name, values in iterations.phase_s.items()}
    with np.errstate(invalid="ignore"):  # of infinite times
        seconds.setdefault("other", np.fmax(0.0, iterations.iteration_s[shown] - sum(seconds.values(), zeros)))
    return {name: seconds.get(name, zeros) for name in ITERATION_PHASES}


def _draw_legend(view: LiveView, pointed: int | None, scale: Scale, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Draw ``height`` rows: a step's time and its phases, in the order of its column."""
    iterations = view.iterations
    places = np.flatnonzero(iterations.step == (-1 if pointed is None else pointed))
    place = int(places[0]) if len(places) else _find_last(iterations)
    words = {name: phase_word(name, glyphs) for name in ITERATION_PHASES}
    # A long word where it leaves room for the figure.
    whole = {"other": view.job.engine.outside_text, "stages": "between stages"}
    words |= {name: word for name, word in whole.items() if len(word) < width - 8}
    last = find_phases(iterations, place)
    usual = () if last.get("unknown") else ("forward", "backward", "step")
    names = [name for name in reversed(ITERATION_PHASES) if name in usual or last.get(name, 0.0) > 0]
    skipped, missing = int(iterations.skipped.sum()), int(np.isnan(iterations.iteration_s).sum())
    iteration_s = float(iterations.iteration_s[place])
    decimals = _choose_decimals(iteration_s, scale)
    rows: list[Row] = []
    if height > 1:
        heading = f"step {int(iterations.step[place])}"
        figure = format_fixed(iteration_s * scale.factor, decimals, 6)
        rows.append(((heading.ljust(width - 6), "heading"), (figure, "value")))
    for name in _choose_longest(names, last, height - len(rows)):
        style, figure = phase_style(name), format_fixed(last.get(name, math.nan) * scale.factor, decimals, 6)
        rows.append(((f"{glyphs.find_sample(style)} ", style), (words[name].ljust(width - 8), "text"), (figure, "value")))
    is_counted = "unknown" not in names and bool((iterations.phase_s.get("unknown", np.empty(0)) > 0).any())
    for text, glyph, style in (
        (f"{skipped} skipped" if skipped else "", glyphs.skipped, "warn"),
        (words["unknown"] if is_counted else "", glyphs.find_sample("phase-unknown"), "phase-unknown"),
        (f"{missing} missing" if missing else "", glyphs.missing, "muted"),
    ):
        if text and len(rows) < height:
            rows.append(((f"{glyph} ", style), (text, "text")))  # no figure in the column of times
    return (rows + [()] * height)[:height]


def _find_last(iterations: Iterations) -> int:
    """Return the index of the last step, if possible one with known phases that is close to the end."""
    last = len(iterations.step) - 1
    unknown = iterations.phase_s.get("unknown")
    known = np.flatnonzero(unknown[-_FAR_STEPS:] == 0) if unknown is not None else np.empty(0, np.intp)
    return int(known[-1]) + max(0, last + 1 - _FAR_STEPS) if len(known) else last


def _choose_longest(names: list[str], last: dict[str, float], most: int) -> list[str]:
    """Return the ``most`` names with the longest times, in the same order."""
    dropped = sorted(names, key=lambda name: last.get(name, 0.0))[: max(0, len(names) - most)]
    return [name for name in names if name not in dropped]


def _choose_decimals(seconds: float, scale: Scale) -> int:
    """Return the decimals of a step's times: more of one that is far shorter than the longest."""
    usual = 2 if scale.top < 20 else 1 if scale.top < 200 else 0
    return 4 if usual == 2 and seconds * scale.factor < 0.1 else usual
