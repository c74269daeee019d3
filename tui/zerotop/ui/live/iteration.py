"""Time per step as columns of stacked phases, the newest at the right."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from zerotop.analysis.live_view import Iterations, LiveView
from zerotop.ui.charts.bars import Part
from zerotop.ui.charts.stacked_columns import stacked_column
from zerotop.ui.charts.step_axis import LABEL_WIDTH, Scale, labels, step_axis, time_scale, with_grid
from zerotop.ui.drawing.formatting import fixed
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import ITERATION_PHASES, last_phases
from zerotop.ui.drawing.rows import Row, Span, filled, merged, to_height
from zerotop.ui.drawing.table import rule
from zerotop.ui.live.memory import panel_title

LEGEND_WIDTH = 17
_WIDEST = 8  # cells of a step
_MARKS = ("accent", "warn", "alert")  # styles of findings


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
        return _chart(view, width, height, glyphs, focused, marks or {})
    rows = [rule(panel_title("Iteration", focused), width, glyphs)]
    if height > 1 and not len(view.iterations.step):
        text = "no step was recorded" if view.job.state.over else "no step finished yet"
        rows.append(filled(((f"  {text}", "muted"),), width, glyphs))
    return to_height(rows, width, height, glyphs)


def _chart(view: LiveView, width: int, height: int, glyphs: Glyphs, focused: bool, marks: Mapping[int, str]) -> list[Row]:
    iterations, chart_height = view.iterations, height - 2
    legend = LEGEND_WIDTH if width >= 36 else 0
    chart_width = width - (legend + 2 if legend else 0)
    room = chart_width - LABEL_WIDTH - 1
    step_width = _step_width(view.progress.total_steps, room)
    shown = range(max(0, len(iterations.step) - room // step_width), len(iterations.step))
    # More steps than are shown decide about the scale, so that it does not change with each that leaves.
    scale = time_scale(iterations.iteration_s[-4 * room // step_width :], chart_height)
    plot = _plot(iterations, shown, scale, step_width, room, chart_height, glyphs, marks)
    axis = labels(scale, chart_height, glyphs)
    side = _legend(iterations, scale, chart_height, glyphs) if legend else [()] * chart_height
    rows = [rule(panel_title(f"Iteration {scale.unit}", focused), width, glyphs)]
    for label, cells, entry in zip(axis, plot, side, strict=True):
        body = filled((*label, *cells), chart_width, glyphs)
        rows.append(filled((*body, ("  ", "text"), *entry) if legend else body, width, glyphs))
    steps = (int(iterations.step[index]) for index in shown)
    rows.append(filled(step_axis(steps, step_width, room, glyphs), width, glyphs))
    return rows


def _step_width(total: int | None, room: int) -> int:
    """Cells for each step: more than one only where the whole run fits, so that nothing is rescaled later."""
    return max(1, min(_WIDEST, room // total)) if total else 1


def _plot(
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
    above = height - scale.plotted(height)
    taken = slice(shown.start, shown.stop)
    facts = (iterations.iteration_s[taken].tolist(), iterations.skipped[taken].tolist(), _parts(iterations, taken))
    columns = [_column(*step, scale.highest, height - above, above, glyphs) for step in zip(*facts, strict=True)]
    for step, column in zip(iterations.step[taken].tolist() if marks else (), columns, strict=False):
        if (mark := marks.get(step)) is not None:
            column[0] = (glyphs.marked, _over(column[0], mark, glyphs) if column[0][0].strip() else mark)
    gap = " " * (step_width > 2)
    ticks = scale.tick_rows(height)
    rows: list[Row] = []
    for row in range(height):
        spans = [column[row] for column in columns]
        if step_width > 1:
            spans = [part for span in spans for part in (*_wide(*span, step_width - len(gap)), (gap, "text"))]
        rows.append(with_grid(merged(spans), room, glyphs) if row in ticks else merged(spans))
    return rows


def _wide(text: str, style: str, width: int) -> list[Span]:
    """A cell as wide as its column; a mark on it stays one mark, in the middle."""
    over, _, under = style.partition("/")
    left = (width - 1) // 2
    if over in _MARKS and not under:
        return [(" " * left, "text"), (text, style), (" " * (width - 1 - left), "text")]
    if over not in ("clipped", "skipped", *_MARKS) or not under:
        return [(text * width, style)]
    return [("█" * left, under), (text, style), ("█" * (width - 1 - left), under)]


def _column(
    took_s: float, skipped: bool, parts: tuple[Part, ...], top_s: float, height: int, above: int, glyphs: Glyphs
) -> list[Span]:
    """One step's cells from the top down, marked where it is too tall for the chart or was skipped."""
    cells = [(" ", "text")] * above + list(stacked_column(parts, top_s, height, glyphs))
    if took_s > top_s * 1.001:
        cells[above] = (glyphs.clipped, _over(cells[above], "clipped", glyphs))
    if skipped:
        free = [row for row in range(above + height) if cells[row][0] == " "]
        if free:
            cells[free[-1]] = (glyphs.skipped, "warn")
        else:
            cells[0] = (glyphs.skipped, _over(cells[0], "skipped", glyphs))
    return cells


def _over(cell: Span, mark: str, glyphs: Glyphs) -> str:
    """The style of a mark on what a cell shows."""
    return f"{mark}/{cell[1].split('/')[0]}" if glyphs.smooth else mark


def _parts(iterations: Iterations, taken: slice) -> list[tuple[Part, ...]]:
    """What each step is made of; what nobody recorded is nothing to draw."""
    nothing = np.zeros(len(iterations.step[taken]))
    known = {name: np.fmax(0.0, values[taken]) for name, values in iterations.phase_s.items()}
    with np.errstate(invalid="ignore"):  # of times without end nothing is left
        known.setdefault("other", np.fmax(0.0, iterations.iteration_s[taken] - sum(known.values(), nothing)))
    styles = [f"phase-{name}" for name in ITERATION_PHASES]
    seconds = zip(*(known.get(name, nothing).tolist() for name in ITERATION_PHASES), strict=True)
    return [tuple(zip(styles, step, strict=True)) for step in seconds]


def _legend(iterations: Iterations, scale: Scale, height: int, glyphs: Glyphs) -> list[Row]:
    """The last step's phases from the top of its column down, under their sum."""
    last = last_phases(iterations)
    always = ("forward", "backward", "step")
    names = [name for name in reversed(ITERATION_PHASES) if name in always or last.get(name, 0.0) > 0]
    skipped = int(iterations.skipped.sum())
    rows: list[Row] = []
    if height > len(names):
        heading = f"step {int(iterations.step[-1])}"
        whole = _figure(float(iterations.iteration_s[-1]), scale)
        rows.append(((heading.ljust(LEGEND_WIDTH - 6), "heading"), (whole, "value")))
    for name in _largest(names, last, height):
        style, figure = f"phase-{name}", _figure(last.get(name, math.nan), scale)
        rows.append(((f"{glyphs.sample(style)} ", style), (name.ljust(LEGEND_WIDTH - 8), "text"), (figure, "value")))
    if skipped and len(rows) < height:
        text = "skipped".ljust(LEGEND_WIDTH - 8)
        rows.append(((f"{glyphs.skipped} ", "warn"), (text, "text"), (str(skipped).rjust(6), "value")))
    return (rows + [()] * height)[:height]


def _largest(names: list[str], last: dict[str, float], most: int) -> list[str]:
    """The ``most`` names with the longest times, still in order."""
    dropped = sorted(names, key=lambda name: last.get(name, 0.0))[: max(0, len(names) - most)]
    return [name for name in names if name not in dropped]


def _figure(seconds: float, scale: Scale) -> str:
    value = seconds * scale.factor
    return fixed(value, 2 if scale.top < 20 else 1 if scale.top < 200 else 0, 6)
