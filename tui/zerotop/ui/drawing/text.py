"""Make foreign text safe to draw, and fit it into cells."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from rich.cells import cell_len, set_cell_size

from zerotop.ui.drawing.glyphs import Glyphs

# Bidirectional overrides and other invisible characters can disguise a line.
_INVISIBLE = {"Cf", "Cs", "Co", "Cn"}
# Characters of one cell each, including all that the program draws with.
_match_narrow = re.compile(r"[ -~\u00a1-\u00ac\u00ae-\u00ff\u2010-\u2027\u2190-\u21ff\u2500-\u25fc\u2800-\u28ff]*").fullmatch


@lru_cache(maxsize=4096)
def sanitize(text: str, glyphs: Glyphs) -> str:
    """Return the text without control, escape and invisible characters."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_sanitize_character(character, glyphs) for character in text.expandtabs(8))


def _sanitize_character(character: str, glyphs: Glyphs) -> str:
    category = unicodedata.category(character)
    if category == "Cc" or category in _INVISIBLE or category in ("Zl", "Zp"):
        return "" if category == "Cf" else glyphs.unsafe
    if glyphs.name == "ascii" and not character.isascii():
        return glyphs.to_plain(character) if glyphs.to_plain(character).isascii() else glyphs.unsafe
    return character


def is_narrow(text: str) -> bool:
    """Return whether each character takes one cell, as in nearly all rows: then the width is ``len(text)``."""
    return text.isascii() or _match_narrow(text) is not None


def cell_width(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def fit_text(text: str, width: int, glyphs: Glyphs, *, at_words: bool = True) -> str:
    """Return the text in at most ``width`` cells, shortened with an ellipsis, between words if possible."""
    if cell_width(text) <= width:
        return text
    room = width - len(glyphs.ellipsis)
    if room <= 0:
        return set_cell_size(text, max(0, width))
    short = set_cell_size(text, room).rstrip()
    if at_words:
        space = short.rfind(" ")
        short = short[:space].rstrip() if space >= room * 2 // 3 and text[len(short) : len(short) + 1] != " " else short
    return short + glyphs.ellipsis


def wrap_text(text: str, width: int, max_lines: int, glyphs: Glyphs) -> list[str]:
    """Return the text in at most ``max_lines`` lines of at most ``width`` cells, broken between words."""
    lines: list[str] = []
    words = text.split()
    while words and len(lines) < max_lines:
        if len(lines) == max_lines - 1:
            lines.append(fit_text(" ".join(words), width, glyphs))
            break
        line = words.pop(0)
        while words and cell_width(line) + 1 + cell_width(words[0]) <= width:
            line += " " + words.pop(0)
        lines.append(fit_text(line, width, glyphs))
    return lines
