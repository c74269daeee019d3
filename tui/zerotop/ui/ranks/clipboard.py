"""The numbers of the ranks screen for the clipboard: tabs between columns, a heading first, SI units."""

from __future__ import annotations

from zerotop.analysis.ranks.matrix import Metric
from zerotop.analysis.text_tables import format_tsv
from zerotop.ui.ranks.model import RankPicture

_UNITS = {Metric.PEAK: "_bytes", Metric.FREE: "_bytes", Metric.CORES: ""}


def matrix_text(picture: RankPicture) -> str:
    """A row for each rank in the order that is shown, a column for each step."""
    if not picture.values.size:
        return ""
    matrix = picture.matrix
    rows = [(f"rank, {_format_name(picture.metric)}", *(f"step {step}" for step in matrix.steps.tolist()))]
    for row in picture.order.tolist():
        rows.append((matrix.rank_numbers[row], *picture.values[row].tolist()))
    return format_tsv(rows)


def table_text(picture: RankPicture) -> str:
    """A row for each figure of the chosen rank, and what the median rank has."""
    if picture.chosen is None or not picture.table_rows:
        return ""
    heading = ("figure", f"rank {picture.matrix.rank_numbers[picture.chosen]}", "median rank")
    return format_tsv([heading, *((_format_name(one.metric), one.own, one.usual) for one in picture.table_rows)])


def _format_name(metric: Metric) -> str:
    return metric.value + _UNITS.get(metric, "_s")
