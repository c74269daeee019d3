"""Charts of a sweep: a measurement over the setting of the axis, a line for each series."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zerotop.analysis.sweeps.series import ALLOCATED, HOST, ITERATIONS, RESERVED, TOKENS, Series, read_measurement
from zerotop.session.samples import Floats
from zerotop.session.sweeps import Value
from zerotop.ui.charts import AXIS_WIDTH, Canvas, Quantity, add_axes, choose_scale, draw_axis, plot_grid, plot_line
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, choose_items, fit_row, join_rows
from zerotop.ui.drawing.text import sanitize
from zerotop.ui.sweep.model import SERIES_STYLES, SweepModel

TITLES = {
    ALLOCATED: "Peak allocated",
    RESERVED: "Peak reserved",
    HOST: "Peak host memory",
    ITERATIONS: "Iterations per second",
    TOKENS: "Tokens per second",
}
_QUANTITIES = {ALLOCATED: Quantity.BYTES, RESERVED: Quantity.BYTES, HOST: Quantity.BYTES}
_UNIT_WORDS = {"k": "thousands", "M": "millions", "G": "billions"}
_EDGE = 2  # cells left free at both ends of the axis


def draw_chart(model: SweepModel, measurement: str, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Draw one chart with its title and axes, ``height`` rows of ``width`` cells."""
    plot_height = max(1, height - 2)
    series = model.series
    values = [read_measurement(one, measurement) for one in series]
    largest = max((float(np.nanmax(one)) for one in values if len(one) and not np.isnan(one).all()), default=0.0)
    scale = choose_scale(_QUANTITIES.get(measurement, Quantity.NUMBER), largest, plot_height)
    canvas = Canvas(width - AXIS_WIDTH, plot_height, glyphs)
    columns = _AxisColumns(model.sweep.plan.settings[model.axis], canvas.width)
    if measurement in _QUANTITIES and measurement != HOST:
        _mark_failures(canvas, columns, model, glyphs)
    for number, (one, numbers) in enumerate(zip(series, values, strict=True)):
        _plot_series(canvas, columns, model.axis, one, numbers, SERIES_STYLES[number % len(SERIES_STYLES)], scale.highest)
    plot_grid(canvas, scale)
    below = draw_axis(columns.list_labels(), canvas.width, glyphs)
    unit = _UNIT_WORDS.get(scale.unit, scale.unit)
    title = f"{TITLES[measurement]}, {unit}" if unit else TITLES[measurement]
    rule: list[Span] = [(title, "title"), (" ", "rule"), (glyphs.rule * max(0, width - len(title) - 1), "rule")]
    rows = [fit_row(tuple(rule), width, glyphs), *add_axes(canvas, scale, below)]
    return [fit_row(row, width, glyphs) for row in rows[:height]]


class _AxisColumns:
    """Columns of the values of the horizontal axis: numbers at their distances, words evenly."""

    def __init__(self, values: Sequence[Value], width: int) -> None:
        self._is_numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        self._values = sorted(values, key=float) if self._is_numeric else list(values)
        self._width = width

    def find_position(self, value: Value) -> float:
        """Return the position of a value in cells."""
        first, last = self._place(self._values[0]), self._place(self._values[-1])
        share = (self._place(value) - first) / (last - first) if last > first else 0.5
        return _EDGE + share * max(1, self._width - 1 - 2 * _EDGE)

    def _place(self, value: Value) -> float:
        return float(value) if self._is_numeric else float(self._values.index(value))

    def list_labels(self) -> list[tuple[int, str]]:
        """Return (column, text) of the values, each centred below its position; the last one comes first in importance."""
        labels = []
        end = -2
        last = self._label(self._values[-1])
        for value in self._values[:-1]:
            column, text = self._label(value)
            if column > end + 1 and column + len(text) < last[0] - 1:
                labels.append((column, text))
                end = column + len(text)
        return [*labels, last]

    def _label(self, value: Value) -> tuple[int, str]:
        text = str(value)
        column = round(self.find_position(value) - len(text) / 2 + 0.5)
        return max(0, min(self._width - len(text), column)), text


def _plot_series(
    canvas: Canvas, columns: _AxisColumns, axis: str, series: Series, values: Floats, style: str, top: float
) -> None:
    """Draw a line through the points, and a dot at each."""
    known = ~np.isnan(values)
    if not known.any():
        return
    points = [point for point, is_known in zip(series.points, known, strict=True) if is_known]
    x = np.array([columns.find_position(point.settings[axis]) for point in points])
    y = values[known]
    if len(x) > 1:
        dots = (np.arange(canvas.dot_columns) + 0.5) / 2
        line = np.interp(dots, x + 0.5, y, left=np.nan, right=np.nan)
        plot_line(canvas, line, line, style, top=top)
    for position, value in zip(x.tolist(), y.tolist(), strict=True):
        row = canvas.height - 1 - min(canvas.height - 1, int(value / top * canvas.height))
        canvas.write_mark(round(position), row, canvas.glyphs.dot, style)


def _mark_failures(canvas: Canvas, columns: _AxisColumns, model: SweepModel, glyphs: Glyphs) -> None:
    """Mark points that ran out of memory at the upper edge, one below the other."""
    used: dict[int, int] = {}
    for number, series in enumerate(model.series):
        for point in series.out_of_memory:
            column = round(columns.find_position(point.settings[model.axis]))
            row = used.get(column, 0)
            used[column] = row + 1
            canvas.write_mark(column, row, glyphs.skipped, SERIES_STYLES[number % len(SERIES_STYLES)])


def draw_legend(model: SweepModel, width: int, glyphs: Glyphs) -> Row:
    """Draw the colours of the series, and the axis."""
    items: list[tuple[int, Row]] = []
    for number, series in enumerate(model.series):
        if series.label:
            label = sanitize(series.label.replace("expandable_segments:True", "expandable segments"), glyphs)
            style = SERIES_STYLES[number % len(SERIES_STYLES)]
            items.append((len(model.series) - number + 1, ((f"{glyphs.swatch} ", style), (label, "text"))))
    items.append((1, ((f"over {model.axis.replace('_', '-')}", "muted"),)))
    if any(series.out_of_memory for series in model.series):
        items.append((0, ((f"{glyphs.skipped} out of memory", "muted"),)))
    return fit_row(((" ", "text"), *join_rows(choose_items(items, width - 2, 3), 3)), width, glyphs)
