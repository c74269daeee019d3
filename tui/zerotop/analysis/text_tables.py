"""Rows as plain text: tab-separated for the clipboard, aligned for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def format_tsv(rows: Iterable[Iterable[object]]) -> str:
    """Return tab-separated lines; None is an empty cell."""
    return "\n".join("\t".join("" if cell is None else str(cell) for cell in row) for row in rows)


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
