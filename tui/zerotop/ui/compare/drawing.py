"""Recordings side by side as a table: what is the same is muted, what differs is bright."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zerotop.analysis.reports.measures import Comparison, Measure, Unit, Value
from zerotop.ui.drawing.formatting import MISSING, count, grouped, significant, time_unit
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, filled, merged
from zerotop.ui.drawing.text import cells, fit, literal
from zerotop.ui.drawing.units import giga

GAP = 2
LABEL, NARROWEST, WIDEST = 30, 15, 44
_NUMBER = 10  # cells of `` 21.08 GiB``
_EXACT = 1_000_000  # counts below are told to the last digit


def shown(number: int, width: int) -> tuple[int, int]:
    """(how many of so many recordings fit beside one another, cells of each)."""
    room = width - _label_width(width)
    fits = max(1, min(number, room // (NARROWEST + GAP)))
    return fits, max(1, min(WIDEST, room // fits - GAP))


def _label_width(width: int) -> int:
    return min(LABEL, max(12, width // 3))


def head(comparison: Comparison, width: int, glyphs: Glyphs) -> Row:
    """The names over their columns."""
    fits, size = shown(len(comparison.names), width)
    left = len(comparison.names) - fits
    more = f"{left} more need a wider terminal" if left else ""
    spans: list[Span] = [(fit(more, _label_width(width), glyphs).ljust(_label_width(width)), "band-warn")]
    for name in comparison.names[:fits]:
        spans += [(" " * GAP, "band"), (_right(fit(literal(name, glyphs), size, glyphs, words=False), size), "name")]
    return filled(merged(spans), width, glyphs, "band")


def rows(comparison: Comparison, width: int, glyphs: Glyphs, *, only_differing: bool = False) -> list[Row]:
    """A row for each measure under its section's heading, however many that makes."""
    measures = comparison.differing if only_differing else comparison.measures
    result: list[Row] = []
    section = ""
    for measure in measures:
        if measure.section != section:
            section = measure.section
            result += [filled((), width, glyphs)] if result else []
            title = f"{section} "
            result.append(filled(((title, "title"), (glyphs.rule * (width - len(title)), "rule")), width, glyphs))
        result.append(_row(measure, width, glyphs))
    if not result:
        result.append(filled((("Nothing differs by more than runs of one job do.", "muted"),), width, glyphs))
    return result


def _row(measure: Measure, width: int, glyphs: Glyphs) -> Row:
    fits, size = shown(len(measure.values), width)
    label = _label_width(width)
    bright = measure.differs
    spans: list[Span] = [(fit(literal(measure.name, glyphs), label, glyphs).ljust(label), "text" if bright else "muted")]
    for place, text in enumerate(texts(measure)[:fits]):
        factor = _factor(measure, place, glyphs) if bright and size >= NARROWEST else ""
        room = _NUMBER if factor else size
        style = "muted" if measure.values[place] is None or not bright else "value"
        value = _fitting(literal(glyphs.plain(text), glyphs), room, glyphs)
        spans += [(" " * GAP + factor.rjust(size - room), "accent"), (_right(value, room), style)]
    return filled(merged(spans), width, glyphs)


def _fitting(text: str, width: int, glyphs: Glyphs) -> str:
    """Shortened at its end; a path at its begin, which says less."""
    if "/" not in text or " " in text or cells(text) <= width:
        return fit(text, width, glyphs)
    return glyphs.ellipsis + text[len(text) - max(0, width - len(glyphs.ellipsis)) :]


def _right(text: str, width: int) -> str:
    return " " * (width - cells(text)) + text


def _factor(measure: Measure, place: int, glyphs: Glyphs) -> str:
    """How many times the first one's value it is; nothing where that is not a thing to say."""
    factor = measure.factor(place) if place else math.nan
    return "" if math.isnan(factor) else f"{significant(factor)}{glyphs.times}"


def texts(measure: Measure) -> list[str]:
    """The values as people read them, all in one unit."""
    numbers = [value for value in measure.values if isinstance(value, int | float)]
    largest = max(map(abs, numbers), default=0.0)
    return [MISSING if value is None else _text(value, measure.unit, largest) for value in measure.values]


def _text(value: Value, unit: Unit, largest: float) -> str:
    if not isinstance(value, int | float):
        return str(value)
    if unit is Unit.SECONDS:
        word, factor = time_unit(largest)
        return f"{significant(value * factor)} {word}"
    if unit is Unit.BYTES:
        return f"{value / giga().bytes:.2f} {giga().name}"
    if unit is Unit.RATE:
        return f"{count(value)}/s"
    return grouped(int(value)) if value < _EXACT else count(value)


def table(comparison: Comparison, width: int, glyphs: Glyphs) -> Sequence[Row]:
    """Head and all rows."""
    return [head(comparison, width, glyphs), *rows(comparison, width, glyphs)]
