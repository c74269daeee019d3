"""The numbers of the ranks screen for the clipboard: tabs between columns, a heading first, SI units."""

from __future__ import annotations

import math
from collections.abc import Iterable

from zerotop.analysis.ranks.matrix import Metric
from zerotop.ui.ranks.model import Picture

_UNITS = {Metric.PEAK: "_bytes", Metric.FREE: "_bytes", Metric.CORES: ""}


def matrix_text(picture: Picture) -> str:
    """A row for each rank in the order that is shown, a column for each step."""
    if not picture.values.size:
        return ""
    matrix = picture.matrix
    rows = ["\t".join((f"rank, {_name(picture.metric)}", *(f"step {step}" for step in matrix.steps.tolist())))]
    for row in picture.order.tolist():
        rows.append("\t".join((str(matrix.ranks[row]), *_figures(picture.values[row].tolist()))))
    return "\n".join(rows)


def table_text(picture: Picture) -> str:
    """A row for each figure of the chosen rank, and what the median rank has."""
    if picture.chosen is None or not picture.table:
        return ""
    rows = ["\t".join(("figure", f"rank {picture.matrix.ranks[picture.chosen]}", "median rank"))]
    rows += ["\t".join((_name(one.metric), *_figures((one.own, one.usual)))) for one in picture.table]
    return "\n".join(rows)


def _name(metric: Metric) -> str:
    return metric.value + _UNITS.get(metric, "_s")


def _figures(values: Iterable[float]) -> list[str]:
    return ["" if math.isnan(value) else f"{value:.6g}" for value in values]
