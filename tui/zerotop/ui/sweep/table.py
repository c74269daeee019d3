"""The table of points: settings, peaks, pace and outcome, with the colour of each point's series."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from zerotop.analysis.reports.sweep_verdict import find_fastest
from zerotop.analysis.sweeps.series import ALLOCATED
from zerotop.recording.sweeps import CRASHED, HUNG, OK, OUT_OF_MEMORY, SKIPPED, Point, PointAttempt, Result
from zerotop.ui.drawing.formatting import MISSING, format_clock, format_number, format_significant
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_row, highlight_row, row_width
from zerotop.ui.drawing.table import Column, draw_rule, place_columns
from zerotop.ui.drawing.text import fit_text, sanitize
from zerotop.ui.drawing.units import giga_unit
from zerotop.ui.sweep.model import SweepModel

OUTCOME_STYLES = {
    OK: ("ok", "good"),
    OUT_OF_MEMORY: ("out of memory", "alert"),
    HUNG: ("hung", "warn"),
    CRASHED: ("crashed", "alert"),
    SKIPPED: ("skipped", "muted"),
}
_OUTCOME_WIDTH = 17
_SHORT_NAMES = {"gradient_checkpointing": "recompute", "gradient_accumulation": "accum", "seq_length": "length"}
_LONGEST_VALUE = 26


@dataclass(frozen=True, slots=True)
class PointLine:
    """One row of the table."""

    point: Point
    attempt: PointAttempt | None
    style: str  # of its series
    is_chosen: bool
    is_fastest: bool


def draw_table(model: SweepModel, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Draw headings and as many points as fit."""
    rows = height - 1
    model.scroll_to_cursor(rows)
    points = model.listed_points[model.top_row : model.top_row + rows]
    fastest = find_fastest(model.sweep) if model.search is None else None
    lines = [
        PointLine(
            point,
            model.progress.attempts.get(point.number),
            model.find_style(point.settings),
            at == model.cursor_row,
            fastest is not None and fastest[0].number == point.number,
        )
        for at, point in enumerate(points, model.top_row)
    ]
    placed = place_columns(_build_columns(model, glyphs), width)
    title: Row = (("Runs" if model.search else "Points", "title"),)
    first = next((begin for column, begin, _ in placed.columns if column.heading), width)
    # Without the numbers of points there is no room for a title before the first heading.
    drawn = [draw_rule(title if first > row_width(title) else (), width, glyphs, placed)]
    for line in lines:
        row = placed.draw_row(line, width, glyphs)
        drawn.append(highlight_row(row) if line.is_chosen and glyphs.smooth else row)
    return [*drawn, *(fit_row((), width, glyphs) for _ in range(height - len(drawn)))]


def _build_columns(model: SweepModel, glyphs: Glyphs) -> list[Column[PointLine]]:
    plan = model.sweep.plan
    unit = giga_unit()
    columns: list[Column[PointLine]] = [
        Column("", 1, 9, lambda line, width: _draw_marker(line, glyphs)),
        Column("", 4, 3, lambda line, width: ((str(line.point.number).rjust(width), "muted"),)),
    ]
    for name, values in plan.settings.items():
        heading = _SHORT_NAMES.get(name, name.replace("_", "-"))
        longest = max(len(str(value)) for value in values)
        size = max(len(heading), min(_LONGEST_VALUE, longest))
        importance = 8 if len(values) > 1 else 1
        is_number = all(isinstance(value, int) for value in values)
        cell = _make_setting_cell(name, glyphs, is_left=not is_number)
        columns.append(Column(heading, size, importance, cell, left=not is_number))
    sizes = [("host_peak_bytes", "host", 4)]
    if model.charts[0] == ALLOCATED:
        sizes = [
            ("allocated_peak_bytes", "allocated", 7),
            ("reserved_peak_bytes", "reserved", 6),
            ("nvml_peak_bytes", "NVML", 2),
            *sizes,
        ]
    for name, heading, importance in sizes:
        text = f"{heading} {unit.name}"
        columns.append(
            Column(text, max(7, len(text)), importance, _make_number_cell(name, lambda value: f"{value / unit.bytes:.2f}"))
        )
    columns += [
        Column("step cores", 10, 2, _make_number_cell("step_cores", lambda value: f"{value:.1f}")),
        Column("it/s", 6, 6, _make_number_cell("iterations_per_s", format_significant)),
        Column("tokens/s", 8, 7, _make_number_cell("tokens_per_s", format_number)),
        Column("time", 6, 4, _make_number_cell("seconds", format_clock)),
        Column("outcome", _OUTCOME_WIDTH, 9, lambda line, width: _draw_outcome(line, width, glyphs), grows=True, left=True),
    ]
    return columns


def _draw_marker(line: PointLine, glyphs: Glyphs) -> Row:
    result = line.point.result
    is_drawn = result is not None and result.outcome in (OK, OUT_OF_MEMORY)
    return ((glyphs.swatch, line.style),) if is_drawn else ((" ", "text"),)


def _make_setting_cell(name: str, glyphs: Glyphs, *, is_left: bool) -> Callable[[PointLine, int], Row]:
    def draw(line: PointLine, width: int) -> Row:
        style = "muted" if line.point.result is None and line.attempt is None else "value"
        text = fit_text(sanitize(str(line.point.settings[name]), glyphs), width, glyphs, at_words=False)
        return ((text.ljust(width) if is_left else text.rjust(width), style),)

    return draw


def _make_number_cell(name: str, form: Callable[[float], str]) -> Callable[[PointLine, int], Row]:
    def draw(line: PointLine, width: int) -> Row:
        value = getattr(line.point.result, name) if line.point.result is not None else None
        if value is None:
            return ((("" if line.point.result is None else MISSING).rjust(width), "muted"),)
        return ((form(value).rjust(width), "text"),)

    return draw


def _draw_outcome(line: PointLine, width: int, glyphs: Glyphs) -> Row:
    result, attempt = line.point.result, line.attempt
    if attempt is not None:
        again = f", attempt {attempt.number}" if attempt.number > 1 else ""
        clock = format_clock(time.time() - attempt.begun_s)
        doing = f"running {clock}{again}"
        if attempt.is_compiling:
            doing = f"compiling DeepSpeed's operators {clock}"
            doing = doing if len(doing) <= width else f"compiling {clock}"
        return ((fit_text(doing, width, glyphs), "accent"),)
    if result is None:
        return (("waiting", "muted"),)
    if line.is_fastest:
        return (("ok, fastest", "good"),)
    return _draw_result(result, width, glyphs)


def _draw_result(result: Result, width: int, glyphs: Glyphs) -> Row:
    word, style = OUTCOME_STYLES[result.outcome]
    reason = result.reason or (f"attempt {result.attempts}" if result.attempts > 1 else "")
    room = width - len(word) - 2
    if not reason or room < 12:
        return ((fit_text(word, width, glyphs), style),)
    return ((word, style), ("  ", "text"), (fit_text(sanitize(reason, glyphs), room, glyphs), "muted"))
