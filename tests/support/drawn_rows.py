"""Rows that a panel draws, as text."""

from __future__ import annotations

from collections.abc import Iterable

from zerotop.ui.drawing.rows import Row, row_text


def read_texts(rows: Iterable[Row]) -> list[str]:
    """Return the text of each row."""
    return [row_text(row) for row in rows]
