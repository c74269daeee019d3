"""Time per step as columns of stacked phases, the newest at the right."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from zerotop.analysis.live_view import Iterations, LiveView
from zerotop.ui.charts.bars import Part
from zerotop.ui.charts.stacked_columns import draw_stacked_column
from zerotop.ui.charts.step_axis import (
    LABEL_WIDTH,
    Scale,
    choose_time_scale,
    draw_axis_labels,
    draw_grid_row,
    draw_step_axis,
)
from zerotop.ui.drawing.formatting import format_fixed
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import ITERATION_PHASES, find_last_phases
from zerotop.ui.drawing.rows import Row, Span, fit_height, fit_row, merge_spans
from zerotop.ui.drawing.table import draw_rule
from zerotop.ui.live.memory import panel_title

LEGEND_WIDTH = 17
_MAX_STEP_WIDTH = 8  # cells of a step
_MARK_STYLES = ("accent", "warn", "alert")  # styles of findings


def draw_iteration(
    view: LiveView,
    width: int,
    height: int,
    glyphs: Glyphs,
    *,
    focused: bool = False,
    marks: Mapping[int, str] | None = None,
) -> list[Row]:
    """Title, chart with a y axis and a legend with the last step's values, step numbers below.

    ``marks``: step -> style of a mark above its column.
    """
    if height >= 4 and len(view.iterations.step):
        return _draw_chart(view, width, height, glyphs, focused, marks or {})
    rows = [draw_rule(panel_title("Iteration", focused), width, glyphs)]
    if height > 1 and not len(view.iterations.step):
        text = "no step was recorded" if view.job.state.is_over else "no step finished yet"
        rows.append(fit_row(((f"  {text}", "muted"),), width, glyphs))
    return fit_height(rows, width, height, glyphs)


def _draw_chart(
    view: LiveView, width: int, height: int, glyphs: Glyphs, focused: bool, marks: Mapping[int, str]
) -> list[Row]:
    iterations, chart_height = view.iterations, height - 2
    legend = LEGEND_WIDTH if width >= 36 else 0
    chart_width = width - (legend + 2 if legend else 0)
    room = chart_width - LABEL_WIDTH - 1
    step_width = _choose_step_width(view.progress.total_steps, room)
    shown = range(max(0, len(iterations.step) - room // step_width), len(iterations.step))
    # More steps than are shown decide about the scale, so that it does not change with each that leaves.
    scale = choose_time_scale(iterations.iteration_s[-4 * room // step_width :], chart_height)
    plot = _draw_plot(iterations, shown, scale, step_width, room, chart_height, glyphs, marks)
    axis = draw_axis_labels(scale, chart_height, glyphs)
    side = _draw_legend(iterations, scale, chart_height, glyphs) if legend else [()] * chart_height
    rows = [draw_rule(panel_title(f"Iteration {scale.unit}", focused), width, glyphs)]
    for label, cells, entry in zip(axis, plot, side, strict=True):
        body = fit_row((*label, *cells), chart_width, glyphs)
        rows.append(fit_row((*body, ("  ", "text"), *entry) if legend else body, width, glyphs))
    steps = (int(iterations.step[index]) for index in shown)
    rows.append(fit_row(draw_step_axis(steps, step_width, room, glyphs), width, glyphs))
    return rows


def _choose_step_width(total: int | None, room: int) -> int:
    """Cells for each step: more than one only where the whole run fits, so that nothing is rescaled later."""
    return max(1, min(_MAX_STEP_WIDTH, room // total)) if total else 1


def _draw_plot(
    iterations: Iterations,
    shown: range,
    scale: Scale,
    step_width: int,
    room: int,
    height: int,
    glyphs: Glyphs,
    marks: Mapping[int, str],
) -> list[Row]:
    """The chart's rows without axis and legend."""
    above = height - scale.count_plot_rows(height)
    taken = slice(shown.start, shown.stop)
    facts = (iterations.iteration_s[taken].tolist(), iterations.skipped[taken].tolist(), _build_parts(iterations, taken))
    columns = [_draw_step(*step, scale.highest, height - above, above, glyphs) for step in zip(*facts, strict=True)]
    for step, column in zip(iterations.step[taken].tolist() if marks else (), columns, strict=False):
        if (mark := marks.get(step)) is not None:
            column[0] = (glyphs.marked, _overlay_mark(column[0], mark, glyphs) if column[0][0].strip() else mark)
    gap = " " * (step_width > 2)
    ticks = scale.tick_rows(height)
    rows: list[Row] = []
    for row in range(height):
        spans = [column[row] for column in columns]
        if step_width > 1:
            spans = [part for span in spans for part in (*_widen_cell(*span, step_width - len(gap)), (gap, "text"))]
        rows.append(draw_grid_row(merge_spans(spans), room, glyphs) if row in ticks else merge_spans(spans))
    return rows


def _widen_cell(text: str, style: str, width: int) -> list[Span]:
    """A cell as wide as its column; a mark on it stays one mark, in the middle."""
    over, _, under = style.partition("/")
    left = (width - 1) // 2
    if over in _MARK_STYLES and not under:
        return [(" " * left, "text"), (text, style), (" " * (width - 1 - left), "text")]
    if over not in ("clipped", "skipped", *_MARK_STYLES) or not under:
        return [(text * width, style)]
    return [("█" * left, under), (text, style), ("█" * (width - 1 - left), under)]


def _draw_step(
    took_s: float, skipped: bool, parts: tuple[Part, ...], top_s: float, height: int, above: int, glyphs: Glyphs
) -> list[Span]:
    """One step's cells from the top down, marked where it is too tall for the chart or was skipped."""
    cells = [(" ", "text")] * above + list(draw_stacked_column(parts, top_s, height, glyphs))
    if took_s > top_s * 1.001:
        cells[above] = (glyphs.clipped, _overlay_mark(cells[above], "clipped", glyphs))
    if skipped:
        free = [row for row in range(above + height) if cells[row][0] == " "]
        if free:
            cells[free[-1]] = (glyphs.skipped, "warn")
        else:
            cells[0] = (glyphs.skipped, _overlay_mark(cells[0], "skipped", glyphs))
    return cells


def _overlay_mark(cell: Span, mark: str, glyphs: Glyphs) -> str:
    """The style of a mark on what a cell shows."""
    return f"{mark}/{cell[1].split('/')[0]}" if glyphs.smooth else mark


def _build_parts(iterations: Iterations, taken: slice) -> list[tuple[Part, ...]]:
    """What each step is made of; what nobody recorded is nothing to draw."""
    nothing = np.zeros(len(iterations.step[taken]))
    known = {name: np.fmax(0.0, values[taken]) for name, values in iterations.phase_s.items()}
    with np.errstate(invalid="ignore"):  # of times without end nothing is left
        known.setdefault("other", np.fmax(0.0, iterations.iteration_s[taken] - sum(known.values(), nothing)))
    styles = [f"phase-{name}" for name in ITERATION_PHASES]
    seconds = zip(*(known.get(name, nothing).tolist() for name in ITERATION_PHASES), strict=True)
    return [tuple(zip(styles, step, strict=True)) for step in seconds]


def _draw_legend(iterations: Iterations, scale: Scale, height: int, glyphs: Glyphs) -> list[Row]:
    """The last step's phases from the top of its column down, under their sum."""
    last = find_last_phases(iterations)
    always = ("forward", "backward", "step")
    names = [name for name in reversed(ITERATION_PHASES) if name in always or last.get(name, 0.0) > 0]
    skipped = int(iterations.skipped.sum())
    rows: list[Row] = []
    if height > len(names):
        heading = f"step {int(iterations.step[-1])}"
        whole = _format_seconds(float(iterations.iteration_s[-1]), scale)
        rows.append(((heading.ljust(LEGEND_WIDTH - 6), "heading"), (whole, "value")))
    for name in _choose_longest(names, last, height):
        style, figure = f"phase-{name}", _format_seconds(last.get(name, math.nan), scale)
        rows.append(((f"{glyphs.find_sample(style)} ", style), (name.ljust(LEGEND_WIDTH - 8), "text"), (figure, "value")))
    if skipped and len(rows) < height:
        text = "skipped".ljust(LEGEND_WIDTH - 8)
        rows.append(((f"{glyphs.skipped} ", "warn"), (text, "text"), (str(skipped).rjust(6), "value")))
    return (rows + [()] * height)[:height]


def _choose_longest(names: list[str], last: dict[str, float], most: int) -> list[str]:
    """The ``most`` names with the longest times, still in order."""
    dropped = sorted(names, key=lambda name: last.get(name, 0.0))[: max(0, len(names) - most)]
    return [name for name in names if name not in dropped]


def _format_seconds(seconds: float, scale: Scale) -> str:
    value = seconds * scale.factor
    return format_fixed(value, 2 if scale.top < 20 else 1 if scale.top < 200 else 0, 6)
