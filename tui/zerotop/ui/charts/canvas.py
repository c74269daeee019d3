"""The cells of a chart: later drawings cover earlier ones, and the result becomes rows of spans."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from zerotop.ui.charts.columns import Floats, Numbers
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row
from zerotop.ui.drawing.text import cell_width, sanitize

SPACE, FULL, BRAILLE = 0x20, 0x2588, 0x2800
EIGHTHS = np.array([SPACE, *range(0x2581, FULL + 1)], np.uint32)  # a cell filled from below
_HALF_BLOCK = 0x2584  # from this block on, the block covers at least half of its cell

ALL_CELLS = slice(None), slice(None)

Codes = NDArray[np.int16]


class Canvas:
    """``width`` x ``height`` cells, row 0 the uppermost.

    A cell has a character, its style (``fore``) and the style whose colour is behind it (``back``), both as numbers from
    :meth:`number_style`; 0 is no style. All arrays have shape (height, width).
    """

    def __init__(self, width: int, height: int, glyphs: Glyphs) -> None:
        self.width, self.height, self.glyphs = max(0, width), max(0, height), glyphs
        shape = (self.height, self.width)
        self.characters = np.full(shape, SPACE, np.uint32)
        self.fore = np.zeros(shape, np.int16)
        self.back = np.zeros(shape, np.int16)
        self._style_names = [""]
        self._style_numbers = {"": 0}

    def slice_rows(self, row: int, rows: int) -> Canvas:
        """Return some of the rows as a canvas that shares their cells."""
        part = copy.copy(self)
        taken = slice(max(0, row), max(0, row) + max(0, rows))
        part.characters, part.fore, part.back = self.characters[taken], self.fore[taken], self.back[taken]
        part.height = len(part.characters)
        return part

    @property
    def dot_columns(self) -> int:
        """Number of dot columns, two for each cell: the length of the arrays of a line."""
        return 2 * self.width

    def number_style(self, style: str) -> int:
        if style not in self._style_numbers:
            self._style_numbers[style] = len(self._style_names)
            self._style_names.append(style)
        return self._style_numbers[style]

    def fill_ground(self, begin: int, end: int, style: str, *, top: int = 0, bottom: int | None = None) -> None:
        """Put a colour behind columns ``begin`` to ``end`` and rows ``top`` to ``bottom``, both ends exclusive.

        It is invisible without background colours (no colour, ASCII).
        """
        self.back[top:bottom, max(0, begin) : max(0, end)] = self.number_style(style)

    def fill_columns(self, codes: NDArray[np.integer], styles: list[str]) -> None:
        """Put ``styles[code]`` behind each column; a negative code leaves it as it is."""
        numbers = np.array([self.number_style(style) for style in styles] or [0], np.int16)
        codes = np.asarray(codes)[: self.width]
        columns = np.flatnonzero((codes >= 0) & (codes < len(styles)))
        self.back[:, columns] = numbers[codes[columns]]

    def write_text(self, x: int, y: int, text: str, style: str) -> None:
        """Write from (x, y) on, within the canvas. The colour that fills most of each cell stays behind its letter."""
        if not 0 <= y < self.height:
            return
        letters = [letter if cell_width(letter) == 1 else self.glyphs.unsafe for letter in sanitize(text, self.glyphs)]
        letters = letters[max(0, -x) : max(0, self.width - x)]
        cells = y, slice(max(0, x), max(0, x) + len(letters))
        self.back[cells] = self.find_visible(cells)
        self.characters[cells] = [ord(letter) for letter in letters]
        self.fore[cells] = self.number_style(style)

    def write_mark(self, x: int, y: int, character: str, style: str) -> None:
        """Write one character over whatever is there."""
        self.write_text(x, y, character, style)

    def plot_cursor(self, x: int, style: str = "cursor") -> None:
        """Draw a vertical line over everything. Lines that it crosses stay visible, on the cursor's background colour."""
        if not 0 <= x < self.width:
            return
        column = self.characters[:, x]
        crossed = (column > BRAILLE) & (column <= BRAILLE + 255)
        self.back[:, x] = np.where(crossed, self.number_style(f"{style}-ground"), self.find_visible((slice(None), x)))
        self.characters[:, x] = np.where(crossed, column, ord(self.glyphs.line))
        self.fore[:, x] = np.where(crossed, self.fore[:, x], self.number_style(style))

    def find_visible(self, cells: tuple[slice | int, slice | int] = ALL_CELLS) -> Codes:
        """Return the number of the style whose colour fills most of each cell."""
        return choose_visible(self.characters[cells], self.fore[cells], self.back[cells])

    def to_rows(self) -> list[Row]:
        """Return ``height`` rows of exactly ``width`` cells."""
        if not self.width or not self.height:
            return [()] * self.height
        fore = np.where(self.characters == SPACE, 0, self.fore)
        back = np.where(self.characters == FULL, 0, self.back) if self.glyphs.smooth else np.zeros_like(self.back)
        keys = fore.astype(np.int32) * len(self._style_names) + back
        changes = np.ones(keys.shape, np.bool_)
        np.not_equal(keys[:, 1:], keys[:, :-1], out=changes[:, 1:])
        begins = changes.ravel().nonzero()[0]
        text = self.characters.astype("<u4", copy=False).tobytes().decode("utf-32-le")
        starts, names = begins.tolist(), self._name_spans(keys.ravel()[begins].tolist())
        spans = [(text[begin:end], name) for begin, end, name in zip(starts, [*starts[1:], len(text)], names, strict=True)]
        counts = [0, *changes.sum(axis=1).cumsum().tolist()]
        return [tuple(spans[begin:end]) for begin, end in pairwise(counts)]

    def _name_spans(self, keys: list[int]) -> list[str]:
        names: dict[int, str] = {}
        for key in set(keys):
            fore, back = divmod(key, len(self._style_names))
            name = self._style_names[fore] or "text"
            names[key] = f"{name}/{self._style_names[back]}" if back else name
        return [names[key] for key in keys]


def choose_visible(characters: NDArray[np.uint32], fore: Codes, back: Codes) -> Codes:
    """Return the number of the style whose colour fills most of each of these cells."""
    blocks = (characters >= _HALF_BLOCK) & (characters <= FULL)
    return np.where(blocks, fore, back)


def scale_heights(values: Numbers, top: float, size: int) -> Floats:
    """Scale values from 0 to ``top`` to heights from 0 to ``size``, clipped; NaN stays NaN."""
    with np.errstate(all="ignore"):
        return np.clip(np.asarray(values, np.float64) / top * size, 0, size)
