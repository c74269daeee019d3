"""The comparison as a table: differences are bright, the rest is muted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zerotop.analysis.reports.measures import Comparison, Measure, Unit, Value
from zerotop.ui.drawing.formatting import MISSING, choose_time_unit, format_grouped, format_number, format_significant
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, fit_row, merge_spans
from zerotop.ui.drawing.text import cell_width, fit_text, sanitize
from zerotop.ui.drawing.units import giga_unit

GAP = 2
LABEL_WIDTH, MIN_WIDTH, MAX_WIDTH = 30, 15, 44
_NUMBER_WIDTH = 10  # cells of `` 21.08 GiB``
_LEAST_IN_UNIT = 0.1  # of a time in the unit of the longest: below, less than two digits would be left of it
_EXACT_BELOW = 1_000_000  # counts below are exact


def fit_columns(number: int, width: int) -> tuple[int, int]:
    """Return (how many recordings fit side by side, cells of each)."""
    room = width - _label_width(width)
    fits = max(1, min(number, room // (MIN_WIDTH + GAP)))
    return fits, max(1, min(MAX_WIDTH, room // fits - GAP))


def _label_width(width: int) -> int:
    return min(LABEL_WIDTH, max(12, width // 3))


def draw_head(comparison: Comparison, width: int, glyphs: Glyphs) -> Row:
    """Draw the names above their columns."""
    fits, size = fit_columns(len(comparison.names), width)
    left = len(comparison.names) - fits
    more = f"{left} more need a wider terminal" if left else ""
    spans: list[Span] = [(fit_text(more, _label_width(width), glyphs).ljust(_label_width(width)), "band-warn")]
    for name in comparison.names[:fits]:
        spans += [
            (" " * GAP, "band"),
            (_align_right(fit_text(sanitize(name, glyphs), size, glyphs, at_words=False), size), "name"),
        ]
    return fit_row(merge_spans(spans), width, glyphs, "band")


def draw_rows(comparison: Comparison, width: int, glyphs: Glyphs, *, only_differing: bool = False) -> list[Row]:
    """Draw a row for each measure, under its section's heading."""
    measures = comparison.different_measures if only_differing else comparison.measures
    result: list[Row] = []
    section = ""
    for measure in measures:
        if measure.section != section:
            section = measure.section
            result += [fit_row((), width, glyphs)] if result else []
            title = f"{section} "
            result.append(fit_row(((title, "title"), (glyphs.rule * (width - len(title)), "rule")), width, glyphs))
        result.append(_draw_measure(measure, width, glyphs))
    if not result:
        result.append(fit_row((("No difference beyond noise.", "muted"),), width, glyphs))
    return result


def _draw_measure(measure: Measure, width: int, glyphs: Glyphs) -> Row:
    fits, size = fit_columns(len(measure.values), width)
    label = _label_width(width)
    bright = measure.is_different
    spans: list[Span] = [
        (fit_text(sanitize(measure.name, glyphs), label, glyphs).ljust(label), "text" if bright else "muted")
    ]
    for place, text in enumerate(format_values(measure)[:fits]):
        factor = _format_factor(measure, place, glyphs) if bright and size >= MIN_WIDTH else ""
        room = _NUMBER_WIDTH if factor else size
        style = "muted" if measure.values[place] is None or not bright else "value"
        value = _shorten_value(sanitize(glyphs.to_plain(text), glyphs), room, glyphs)
        spans += [(" " * GAP + factor.rjust(size - room), "accent"), (_align_right(value, room), style)]
    return fit_row(merge_spans(spans), width, glyphs)


def _shorten_value(text: str, width: int, glyphs: Glyphs) -> str:
    """Shorten a text at its end, a path at its beginning."""
    if "/" not in text or " " in text or cell_width(text) <= width:
        return fit_text(text, width, glyphs)
    return glyphs.ellipsis + text[len(text) - max(0, width - len(glyphs.ellipsis)) :]


def _align_right(text: str, width: int) -> str:
    return " " * (width - cell_width(text)) + text


def _format_factor(measure: Measure, place: int, glyphs: Glyphs) -> str:
    """Return the change from the first recording's value: ``4.15×`` from twice as much on, else ``−88 %``; "" if unknown."""
    factor = measure.compute_factor(place) if place else math.nan
    if math.isnan(factor):
        return ""
    if factor >= 2:
        return f"{format_significant(factor)}{glyphs.times}"
    percent = round(min(99.0, abs(factor - 1) * 100))  # two digits have room beside the narrowest value
    return f"{'+' if factor >= 1 else glyphs.minus}{percent} %"


def format_values(measure: Measure) -> list[str]:
    """Format the values in one unit; a time that is far shorter than the others in a unit of its own."""
    numbers = [value for value in measure.values if isinstance(value, int | float)]
    largest = max(map(abs, numbers), default=0.0)
    return [MISSING if value is None else _format_value(value, measure.unit, largest) for value in measure.values]


def _format_value(value: Value, unit: Unit, largest: float) -> str:
    if not isinstance(value, int | float):
        return str(value)
    if unit is Unit.SECONDS:
        word, factor = choose_time_unit(largest)
        if 0 < value * factor < _LEAST_IN_UNIT:
            word, factor = choose_time_unit(value)
        return f"{format_significant(value * factor)} {word}"
    if unit is Unit.BYTES:
        return f"{value / giga_unit().bytes:.2f} {giga_unit().name}"
    if unit is Unit.RATE:
        return f"{format_number(value)}/s"
    return format_grouped(int(value)) if value < _EXACT_BELOW else format_number(value)


def draw_table(comparison: Comparison, width: int, glyphs: Glyphs) -> Sequence[Row]:
    """Draw the heading and all rows."""
    return [draw_head(comparison, width, glyphs), *draw_rows(comparison, width, glyphs)]
