"""Charts of a sweep: a measurement over the setting of the axis, a line for each series.

Those of a search have the memory available to PyTorch, and the lines of the series beyond their runs up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from zerotop.analysis.formatting import format_bytes
from zerotop.analysis.sweeps.series import (
    ALLOCATED,
    HOST,
    ITERATIONS,
    RESERVED,
    TOKENS,
    SweepSeries,
    read_measurement,
    read_spread,
)
from zerotop.analysis.sweeps.settings import STAGE
from zerotop.recording.samples import Floats
from zerotop.recording.sweeps import Value
from zerotop.ui.charts import (
    AXIS_WIDTH,
    Canvas,
    add_axes,
    choose_memory_scale,
    choose_scale,
    draw_axis,
    plot_grid,
    plot_line,
)
from zerotop.ui.drawing.formatting import format_number, format_significant
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, choose_items, fit_row, join_rows, row_width
from zerotop.ui.drawing.table import draw_rule
from zerotop.ui.drawing.text import sanitize
from zerotop.ui.sweep.model import SERIES_STYLES, PlacedChart, SweepModel, is_numeric
from zerotop_probe.recording.metrics import BYTES, NUMBER

_LIMIT_STYLE = "warn"
_DOT_SPACING = 3  # dot columns
TITLES = {
    ALLOCATED: "Peak allocated",
    RESERVED: "Peak reserved",
    HOST: "Peak host memory",
    ITERATIONS: "Iterations per second",
    TOKENS: "Tokens per second",
}
_QUANTITIES = {ALLOCATED: BYTES, RESERVED: BYTES, HOST: BYTES}
_FORMS = {ITERATIONS: format_significant, TOKENS: format_number}
_UNIT_WORDS = {"k": "thousands", "M": "millions", "G": "billions"}
_EDGE = 2  # cells left free at both ends of the axis
_ROOM = 1.08  # above the limit of memory, for the marks of failed runs


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


def draw_chart(model: SweepModel, placed: PlacedChart, glyphs: Glyphs) -> list[Row]:
    """Draw one chart with its title and axes; the title has the values under the mouse."""
    measurement, _, _, width, height = placed
    plot_height = max(1, height - 2)
    columns = _AxisColumns(model.shown_values, width - AXIS_WIDTH)
    shown = [_choose_points(one, model) for one in model.series]
    values = [read_measurement(one, measurement) for one in shown]
    spreads = [read_spread(one, measurement) for one in shown]
    numbers = [*values, *(high for _, high in spreads)]
    largest = max((float(np.nanmax(one)) for one in numbers if len(one) and not np.isnan(one).all()), default=0.0)
    limit = find_limit(model) if measurement == ALLOCATED else None
    scale = choose_scale(_QUANTITIES.get(measurement, NUMBER), largest, plot_height)
    if limit is not None:
        scale = choose_memory_scale(max(largest, limit) * _ROOM, plot_height)
    canvas = Canvas(width - AXIS_WIDTH, plot_height, glyphs)
    if limit is not None and is_numeric(model.shown_values):
        plot_search(canvas, model, columns.read_values(canvas.dot_columns), limit, scale.highest)
    if measurement in _QUANTITIES and measurement != HOST:
        _mark_failures(canvas, columns, model.axis, shown, glyphs)
    for number, (one, rates) in enumerate(zip(shown, values, strict=True)):
        style = SERIES_STYLES[number % len(SERIES_STYLES)]
        _plot_spread(canvas, columns, model.axis, one, spreads[number], style, scale.highest)
        _plot_series(canvas, columns, model.axis, one, rates, style, scale.highest)
    if limit is not None:
        name_limit(canvas, limit, scale.highest)
    plot_grid(canvas, scale)
    below = draw_axis(columns.list_labels(), canvas.width, glyphs)
    unit = _UNIT_WORDS.get(scale.unit, scale.unit)
    title = f"{TITLES[measurement]}, {unit}" if unit else TITLES[measurement]
    head = _draw_title(model, placed, title, columns, shown, values, glyphs)
    return [fit_row(row, width, glyphs) for row in [head, *add_axes(canvas, scale, below)][:height]]


def _choose_points(series: SweepSeries, model: SweepModel) -> SweepSeries:
    """Return the points of a series that are on the axis."""
    on_axis = set(model.shown_values)
    measured, failed = (
        tuple(point for point in points if point.settings[model.axis] in on_axis)
        for points in (series.points, series.out_of_memory)
    )
    return replace(series, points=measured, out_of_memory=failed)


def _draw_title(
    model: SweepModel,
    placed: PlacedChart,
    title: str,
    columns: _AxisColumns,
    shown: Sequence[SweepSeries],
    values: Sequence[Floats],
    glyphs: Glyphs,
) -> Row:
    """Draw the title, and at its right the values nearest to the mouse in the colours of their series."""
    if model.pointed is None or not placed.holds(*model.pointed):
        return draw_rule(((title, "title"),), placed.width, glyphs)
    nearest = columns.find_nearest(model.pointed[0] - placed.left - AXIS_WIDTH)
    form = _FORMS.get(placed.measurement, format_bytes)
    spans: list[Span] = [(f" {nearest}", "accent")]
    for number, (one, numbers) in enumerate(zip(shown, values, strict=True)):
        style = SERIES_STYLES[number % len(SERIES_STYLES)]
        for point, value in zip(one.points, numbers.tolist(), strict=True):
            if point.settings[model.axis] == nearest and value == value:
                spans += [(f"  {glyphs.swatch} ", style), (form(value), "value")]
    room = placed.width - row_width(tuple(spans))
    return fit_row((*draw_rule(((title, "title"),), room, glyphs), *spans), placed.width, glyphs)


class _AxisColumns:
    """Columns of the values of the horizontal axis: numbers at their distances, words evenly."""

    def __init__(self, values: Sequence[Value], width: int) -> None:
        self._is_numeric = is_numeric(values)
        self._values = values
        self._width = width

    def find_nearest(self, column: int) -> Value:
        """Return the value that is nearest to a column."""
        return min(self._values, key=lambda value: abs(self.find_position(value) - column))

    def find_position(self, value: Value) -> float:
        """Return the position of a value in cells."""
        first, last = self._place(self._values[0]), self._place(self._values[-1])
        share = (self._place(value) - first) / (last - first) if last > first else 0.5
        return _EDGE + share * max(1, self._width - 1 - 2 * _EDGE)

    def read_values(self, dots: int) -> Floats:
        """Return the values of numbers at ``dots`` columns of dots; outside the axis NaN. Shape (dots,)."""
        first, last = float(self._values[0]), float(self._values[-1])
        shares = ((np.arange(dots) + 0.5) / 2 - 0.5 - _EDGE) / max(1, self._width - 1 - 2 * _EDGE)
        return np.where((shares >= 0) & (shares <= 1), first + shares * (last - first), np.nan)

    def _place(self, value: Value) -> float:
        return float(value) if self._is_numeric else float(self._values.index(value))

    def list_labels(self) -> list[tuple[int, str]]:
        """Return (column, text) of the values, each centred below its position; the last one comes first in importance."""
        labels = []
        end = -2
        last = self._place_label(self._values[-1])
        for value in self._values[:-1]:
            column, text = self._place_label(value)
            if column > end + 1 and column + len(text) < last[0] - 1:
                labels.append((column, text))
                end = column + len(text)
        return [*labels, last]

    def _place_label(self, value: Value) -> tuple[int, str]:
        text = str(value)
        column = round(self.find_position(value) - len(text) / 2 + 0.5)
        return max(0, min(self._width - len(text), column)), text


def _plot_series(
    canvas: Canvas, columns: _AxisColumns, axis: str, series: SweepSeries, values: Floats, style: str, top: float
) -> None:
    """Draw a dot at each point, and a line through those that have distances on the axis: stages and modes have none."""
    known = ~np.isnan(values)
    if not known.any():
        return
    points = [point for point, is_known in zip(series.points, known, strict=True) if is_known]
    x = np.array([columns.find_position(point.settings[axis]) for point in points])
    y = values[known]
    if len(x) > 1 and axis != STAGE and is_numeric([point.settings[axis] for point in points]):
        dots = (np.arange(canvas.dot_columns) + 0.5) / 2
        line = np.interp(dots, x + 0.5, y, left=np.nan, right=np.nan)
        plot_line(canvas, line, line, style, top=top)
    for position, value in zip(x.tolist(), y.tolist(), strict=True):
        row = canvas.height - 1 - min(canvas.height - 1, int(value / top * canvas.height))
        canvas.write_mark(round(position), row, canvas.glyphs.dot, style)


def _plot_spread(
    canvas: Canvas,
    columns: _AxisColumns,
    axis: str,
    series: SweepSeries,
    spread: tuple[Floats, Floats],
    style: str,
    top: float,
) -> None:
    """Draw a vertical line from the lowest to the highest value of each point."""
    low, high = (np.full(canvas.dot_columns, np.nan) for _ in range(2))
    for point, least, most in zip(series.points, *spread, strict=True):
        dot = 2 * round(columns.find_position(point.settings[axis]))
        low[dot], high[dot] = least, most
    plot_line(canvas, low, high, style, top=top)


def _mark_failures(canvas: Canvas, columns: _AxisColumns, axis: str, shown: Sequence[SweepSeries], glyphs: Glyphs) -> None:
    """Mark points that ran out of memory at the upper edge, one below the other."""
    used: dict[int, int] = {}
    for number, series in enumerate(shown):
        for point in series.out_of_memory:
            column = round(columns.find_position(point.settings[axis]))
            row = used.get(column, 0)
            used[column] = row + 1
            canvas.write_mark(column, row, glyphs.skipped, SERIES_STYLES[number % len(SERIES_STYLES)])


def draw_legend(model: SweepModel, width: int, glyphs: Glyphs) -> Row:
    """Draw the colours of the series, and the axis."""
    after: list[tuple[int, Row]] = [(1, ((f"over {model.axis.replace('_', '-')}", "muted"),))]
    if any(series.out_of_memory for series in model.series):
        after.append((0, ((f"{glyphs.skipped} out of memory", "muted"),)))
    labels = [series.label for series in model.series]
    items = [*_list_series(labels, glyphs), *after]
    if len(choose_items(items, width - 2, 3)) < len(items) and all(labels):
        # Too long: the names of the settings once, in front of their values.
        names = ", ".join(name.replace("_", "-") for name in model.series[0].settings)
        values = [", ".join(map(str, series.settings.values())) for series in model.series]
        items = [(len(labels) + 2, ((f"{names}:", "muted"),)), *_list_series(values, glyphs), *after]
    return fit_row(((" ", "text"), *join_rows(choose_items(items, width - 2, 3), 3)), width, glyphs)


def _list_series(labels: Sequence[str], glyphs: Glyphs) -> list[tuple[int, Row]]:
    """Return (importance, colour and label) of each series that has a label; the first ones are the most important."""
    items: list[tuple[int, Row]] = []
    for number, label in enumerate(labels):
        if label:
            text = sanitize(label.replace("expandable_segments:True", "expandable segments"), glyphs)
            style = SERIES_STYLES[number % len(SERIES_STYLES)]
            items.append((len(labels) - number + 1, ((f"{glyphs.swatch} ", style), (text, "text"))))
    return items
