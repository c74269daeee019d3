"""The cells of a chart: what is drawn later lies over what was drawn before, and all of it becomes rows of spans."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from zerotop.ui.charts.columns import Floats, Numbers
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row
from zerotop.ui.drawing.text import cell_width, sanitize

SPACE, FULL, BRAILLE = 0x20, 0x2588, 0x2800
EIGHTHS = np.array([SPACE, *range(0x2581, FULL + 1)], np.uint32)  # a cell filled from below
_HALF_BLOCK = 0x2584  # from this block on, a cell's colour is its block's rather than what is behind

ALL_CELLS = slice(None), slice(None)

Codes = NDArray[np.int16]


class Canvas:
    """``width`` x ``height`` cells, row 0 the uppermost.

    A cell has a character, the style of it (``fore``) and the style whose colour is behind it (``back``), both as numbers
    that :meth:`number` gives; 0 is no style.
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
        """Some of its rows as a canvas: what is drawn there is drawn here."""
        part = Canvas.__new__(Canvas)
        vars(part).update(vars(self))
        place = slice(max(0, row), max(0, row) + max(0, rows))
        part.characters, part.fore, part.back = self.characters[place], self.fore[place], self.back[place]
        part.height = len(part.characters)
        return part

    @property
    def dot_columns(self) -> int:
        """Dot columns: two for each cell. What a line wants to be told."""
        return 2 * self.width

    def number_style(self, style: str) -> int:
        """The number of a style's name."""
        if style not in self._style_numbers:
            self._style_numbers[style] = len(self._style_names)
            self._style_names.append(style)
        return self._style_numbers[style]

    def fill_ground(self, begin: int, end: int, style: str, *, top: int = 0, bottom: int | None = None) -> None:
        """Puts a colour behind the columns from ``begin`` to before ``end``, in the rows from ``top`` to before ``bottom``.

        Where cells have no colours of their own behind them (no colour, ASCII) nothing is to be seen of it.
        """
        self.back[top:bottom, max(0, begin) : max(0, end)] = self.number_style(style)

    def fill_columns(self, codes: NDArray[np.integer], styles: list[str]) -> None:
        """Puts ``styles[code]`` behind each column; a negative code leaves it as it is."""
        numbers = np.array([self.number_style(style) for style in styles] or [0], np.int16)
        codes = np.asarray(codes)[: self.width]
        some = np.flatnonzero((codes >= 0) & (codes < len(styles)))
        self.back[:, some] = numbers[codes[some]]

    def write_text(self, x: int, y: int, text: str, style: str) -> None:
        """Writes over the cells from (x, y) on; what lies beyond the edges is left out. The colour behind stays."""
        if not 0 <= y < self.height:
            return
        letters = [letter if cell_width(letter) == 1 else self.glyphs.unsafe for letter in sanitize(text, self.glyphs)]
        letters = letters[max(0, -x) : max(0, self.width - x)]
        place = y, slice(max(0, x), max(0, x) + len(letters))
        self.back[place] = self.find_visible(place)
        self.characters[place] = [ord(letter) for letter in letters]
        self.fore[place] = self.number_style(style)

    def write_mark(self, x: int, y: int, character: str, style: str) -> None:
        """One character over whatever is there."""
        if 0 <= x < self.width:
            self.write_text(x, y, character, style)

    def plot_cursor(self, x: int, style: str = "cursor") -> None:
        """A vertical line through everything. Where it crosses a line, that stays to be seen, on the line's own colour."""
        if not 0 <= x < self.width:
            return
        column = self.characters[:, x]
        crossed = (column > BRAILLE) & (column <= BRAILLE + 255)
        self.back[:, x] = np.where(crossed, self.number_style(f"{style}-ground"), self.find_visible((slice(None), x)))
        self.characters[:, x] = np.where(crossed, column, ord(self.glyphs.line))
        self.fore[:, x] = np.where(crossed, self.fore[:, x], self.number_style(style))

    def find_visible(self, place: tuple[slice | int, slice | int] = ALL_CELLS) -> Codes:
        """The colour that fills most of each of these cells: what is behind when something is drawn over it."""
        return choose_visible(self.characters[place], self.fore[place], self.back[place])

    def to_rows(self, base: str = "text") -> list[Row]:
        """The picture: ``height`` rows of exactly ``width`` cells. ``base`` is the style where nothing was drawn."""
        if not self.width or not self.height:
            return [()] * self.height
        fore = np.where(self.characters == SPACE, 0, self.fore)
        back = np.where(self.characters == FULL, 0, self.back) if self.glyphs.smooth else np.zeros_like(self.back)
        keys = fore.astype(np.int32) * len(self._style_names) + back
        changes = np.ones(keys.shape, np.bool_)
        np.not_equal(keys[:, 1:], keys[:, :-1], out=changes[:, 1:])
        begins = changes.ravel().nonzero()[0]
        text = self.characters.astype("<u4", copy=False).tobytes().decode("utf-32-le")
        starts, names = begins.tolist(), self._name_spans(keys.ravel()[begins].tolist(), base)
        spans = [(text[begin:end], name) for begin, end, name in zip(starts, [*starts[1:], len(text)], names, strict=True)]
        counts = [0, *changes.sum(axis=1).cumsum().tolist()]
        return [tuple(spans[begin:end]) for begin, end in pairwise(counts)]

    def _name_spans(self, keys: list[int], base: str) -> list[str]:
        names: dict[int, str] = {}
        for key in set(keys):
            fore, back = divmod(key, len(self._style_names))
            name = self._style_names[fore] or base
            names[key] = f"{name}/{self._style_names[back]}" if back else name
        return [names[key] for key in keys]


def choose_visible(characters: NDArray[np.uint32], fore: Codes, back: Codes) -> Codes:
    """Of these cells the colours that fill most of each."""
    blocks = (characters >= _HALF_BLOCK) & (characters <= FULL)
    return np.where(blocks, fore, back)


def scale_heights(values: Numbers, bottom: float, top: float, size: int) -> Floats:
    """How high values are on a scale of ``size`` from ``bottom`` to ``top``, kept within it; NaN stays NaN."""
    with np.errstate(all="ignore"):
        return np.clip((np.asarray(values, np.float64) - bottom) / (top - bottom) * size, 0, size)
