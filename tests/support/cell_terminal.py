"""A terminal that only follows the cursor and keeps the character of each cell."""

from __future__ import annotations

import re
from collections.abc import Iterable

_MOVE = re.compile(r"\x1b\[(\d+);(\d+)H|\x1b\[[\d;]*m|([^\x1b]+)")


class CellTerminal:
    """Lines of cells that are overwritten; every character is one cell wide."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = [list(line) for line in lines]
        self.touched: set[tuple[int, int]] = set()
        """The cells (x, y) that were written so far, whether they changed or not."""

    def write(self, text: str) -> None:
        """Print the text at the positions that its escape sequences give."""
        y = x = 0
        for found in _MOVE.finditer(text):
            row, column, printed = found.groups()
            if row:
                y, x = int(row) - 1, int(column) - 1
            elif printed:
                self.lines[y][x : x + len(printed)] = printed
                self.touched.update((place, y) for place in range(x, x + len(printed)))
                x += len(printed)

    @property
    def text(self) -> list[str]:
        """The lines of text on the terminal."""
        return ["".join(line) for line in self.lines]
