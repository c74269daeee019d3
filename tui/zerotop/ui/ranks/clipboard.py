"""The numbers of the ranks screen for the clipboard: tab-separated, in SI units, with a heading."""

from __future__ import annotations

from zerotop.analysis.text_tables import format_tsv
from zerotop.ui.ranks.model import RankPicture


def format_matrix(picture: RankPicture) -> str:
    """Format a row for each rank in the shown order, with a column for each step."""
    if not picture.values.size:
        return ""
    matrix = picture.matrix
    rows = [(f"rank, {picture.metric.value.heading}", *(f"step {step}" for step in matrix.steps.tolist()))]
    for row in picture.order.tolist():
        rows.append((matrix.rank_numbers[row], *picture.values[row].tolist()))
    return format_tsv(rows)


def format_table(picture: RankPicture) -> str:
    """Format a row for each metric with the chosen and the median rank."""
    if picture.chosen is None or not picture.table_rows:
        return ""
    heading = ("figure", f"rank {picture.matrix.rank_numbers[picture.chosen]}", "median rank")
    return format_tsv([heading, *((one.metric.value.heading, one.own, one.usual) for one in picture.table_rows)])
