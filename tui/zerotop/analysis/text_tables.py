"""Rows as plain text: tab-separated for the clipboard, aligned for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def format_tsv(rows: Iterable[Iterable[object]]) -> str:
    """Return tab-separated lines; floats get six significant digits, None and NaN are empty cells."""
    return "\n".join("\t".join(map(_format_cell, row)) for row in rows)


def _format_cell(cell: object) -> str:
    if isinstance(cell, float):
        return "" if math.isnan(cell) else f"{cell:.6g}"
    return "" if cell is None else str(cell)


def align_columns(rows: Iterable[Sequence[str]], alignment: str) -> list[str]:
    """Return one line per row, columns padded to their widest cell and two spaces apart.

    ``alignment`` has a character per column: ``<`` left, ``>`` right.
    """
    cells = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, alignment, widths, strict=True)).rstrip()
        for row in cells
    ]
