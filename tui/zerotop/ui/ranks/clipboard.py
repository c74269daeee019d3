"""The numbers of the ranks screen for the clipboard: tab-separated, in SI units, with a heading."""

from __future__ import annotations

import math
from collections.abc import Iterable

from zerotop.analysis.ranks.matrix import Metric
from zerotop.ui.ranks.model import RankPicture

_UNITS = {Metric.PEAK: "_bytes", Metric.FREE: "_bytes", Metric.CORES: ""}


def matrix_text(picture: RankPicture) -> str:
    """Format a row for each rank in the shown order, with a column for each step."""
    if not picture.values.size:
        return ""
    matrix = picture.matrix
    rows = ["\t".join((f"rank, {_format_name(picture.metric)}", *(f"step {step}" for step in matrix.steps.tolist())))]
    for row in picture.order.tolist():
        rows.append("\t".join((str(matrix.rank_numbers[row]), *_format_values(picture.values[row].tolist()))))
    return "\n".join(rows)


def table_text(picture: RankPicture) -> str:
    """Format a row for each metric with the chosen and the median rank."""
    if picture.chosen is None or not picture.table_rows:
        return ""
    rows = ["\t".join(("figure", f"rank {picture.matrix.rank_numbers[picture.chosen]}", "median rank"))]
    rows += ["\t".join((_format_name(one.metric), *_format_values((one.own, one.usual)))) for one in picture.table_rows]
    return "\n".join(rows)


def _format_name(metric: Metric) -> str:
    return metric.value + _UNITS.get(metric, "_s")


def _format_values(values: Iterable[float]) -> list[str]:
    return ["" if math.isnan(value) else f"{value:.6g}" for value in values]
