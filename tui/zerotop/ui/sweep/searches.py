"""The largest values that fit, one row for each series that ``zerotop fit`` searches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log2

from zerotop.analysis.formatting import format_count
from zerotop.analysis.sweeps.search import LargestResult
from zerotop.analysis.sweeps.settings import MICRO_BATCH, SEQ_LENGTH
from zerotop.ui.drawing.formatting import MISSING
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_row
from zerotop.ui.drawing.table import Column, draw_rule, place_columns
from zerotop.ui.drawing.text import fit_text, sanitize
from zerotop.ui.drawing.units import giga_unit
from zerotop.ui.sweep.model import SearchProgress, SweepModel

_NAMES = {SEQ_LENGTH: "sequence length", MICRO_BATCH: "micro-batch"}


@dataclass(frozen=True, slots=True)
class SearchLine:
    """One row of the table."""

    result: LargestResult
    style: str  # of its series
    left: int  # values that are still possible


def measure_progress(model: SweepModel, search: SearchProgress) -> float:
    """Return the progress of all searches, 0 to 1, assuming that each point halves the remaining range."""
    share = 0.0
    for line in _build_lines(model, search):
        values = len(model.sweep.plan.settings[search.searched])
        is_over = not line.left or line.result.problem
        share += 1.0 if is_over else 1.0 - log2(line.left + 1) / log2(values + 1)
    return share / max(1, search.series_count)


def count_rows(search: SearchProgress) -> int:
    """Return the rows of the table with its headings, all series included."""
    return 1 + search.series_count


def draw_searches(model: SweepModel, search: SearchProgress, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Draw headings and a row for each series; the latest ones if there is no room for all."""
    lines = _build_lines(model, search)
    placed = place_columns(_build_columns(model, search, glyphs), width)
    title = _name_title(search)
    rows = [draw_rule(((title, "title"),), width, glyphs, placed)]
    rows += [placed.draw_row(line, width, glyphs) for line in lines[-(height - 1) :]]
    return [*rows, *(fit_row((), width, glyphs) for _ in range(height - len(rows)))]


def _name_title(search: SearchProgress) -> str:
    return f"Largest {_NAMES.get(search.searched, search.searched)}"


def _build_lines(model: SweepModel, search: SearchProgress) -> list[SearchLine]:
    values = sorted({int(value) for value in model.sweep.plan.settings[search.searched]})
    return [
        SearchLine(
            result,
            model.find_style(result.settings),
            sum(
                (result.largest is None or value > result.largest) and (result.failing is None or value < result.failing)
                for value in values
            ),
        )
        for result in search.results
    ]


def _build_columns(model: SweepModel, search: SearchProgress, glyphs: Glyphs) -> list[Column[SearchLine]]:
    varied = [name for name in model.sweep.plan.varied if name != search.searched]
    unit = giga_unit()

    def describe_series(line: SearchLine) -> str:
        return ", ".join(f"{name.replace('_', '-')} {line.result.settings[name]}" for name in varied)

    def draw_series(line: SearchLine, width: int) -> Row:
        text = sanitize(describe_series(line), glyphs)
        return ((fit_text(text, width, glyphs).ljust(width), "value"),)

    size = max([len(_name_title(search)) + 1, *(len(describe_series(line)) + 1 for line in _build_lines(model, search))])
    return [
        Column("", 1, 9, lambda line, width: ((glyphs.swatch, line.style),)),
        Column("", min(size, 34), 9, draw_series),
        _make_number("fits", 9, 9, lambda result: result.largest, "value"),
        _make_number("too large", 9, 8, lambda result: result.failing, "text"),
        _make_number("predicted", 9, 3, lambda result: result.predicted, "muted"),
        _make_number("full at", 9, 5, lambda result: result.expected, "text"),
        Column(f"allocated {unit.name}", 13, 4, lambda line, width: _draw_size(line.result.allocated_bytes, width)),
        Column("runs", 4, 6, lambda line, width: ((str(line.result.runs).rjust(width), "text"),)),
        Column("outcome", 16, 7, lambda line, width: _draw_outcome(line, width, glyphs), grows=True, left=True),
    ]


def _make_number(
    heading: str, size: int, importance: int, read: Callable[[LargestResult], float | None], style: str
) -> Column[SearchLine]:
    def draw(line: SearchLine, width: int) -> Row:
        value = read(line.result)
        return (((MISSING if value is None else f"{value:,.0f}").rjust(width), "muted" if value is None else style),)

    return Column(heading, size, importance, draw)


def _draw_size(size: int | None, width: int) -> Row:
    unit = giga_unit()
    return (((MISSING if size is None else f"{size / unit.bytes:.2f}").rjust(width), "text" if size else "muted"),)


def _draw_outcome(line: SearchLine, width: int, glyphs: Glyphs) -> Row:
    result = line.result
    if result.problem:
        return ((fit_text(sanitize(result.problem, glyphs), width, glyphs), "warn"),)
    if not result.is_final:
        return ((fit_text(f"{format_count(line.left, 'value')} left", width, glyphs), "accent"),)
    text, style = ("found", "good") if result.largest is not None else ("none fits", "alert")
    if result.largest is not None and result.failing is None:
        text = "all of them fit"
    return ((fit_text(text, width, glyphs), style),)
