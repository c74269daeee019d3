"""Keeps terminals without UTF-8 readable: only ASCII is written, also by Textual's own widgets."""

from __future__ import annotations

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.text import cell_width

_ASCII_BOXES = str.maketrans(
    {
        **dict.fromkeys("─━═▁▔▀▄▂▃", "-"),
        **dict.fromkeys("│┃║▏▕▎▌▐▊", "|"),
        **dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╯╰┏┓┗┛╋", "+"),
        **dict.fromkeys("█▉▇▆▅▓", "#"),
        **dict.fromkeys("▒░", ":"),
        **dict.fromkeys("●•", "*"),
        "…": ".",  # in Textual's own texts, in as many cells
    }
)


class AsciiFilter(LineFilter):
    """Replaces every character that is not ASCII, cell for cell."""

    def __init__(self, glyphs: Glyphs) -> None:
        super().__init__()
        self.glyphs = glyphs

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment if segment.text.isascii() else Segment(self._replace_text(segment.text), segment.style, segment.control)
            for segment in segments
        ]

    def _replace_text(self, text: str) -> str:
        return "".join(self._replace_character(character) for character in text)

    def _replace_character(self, character: str) -> str:
        if character.isascii():
            return character
        width = cell_width(character)
        plain = character.translate(_ASCII_BOXES)
        if not plain.isascii():
            plain = self.glyphs.to_plain(character)
        if plain.isascii() and len(plain) == width:
            return plain
        return "?" * width
