"""Cells of CSV files that a spreadsheet would run as formulas."""

from __future__ import annotations

import re

# What begins a formula, also in full-width and small forms, and what a spreadsheet skips before it: blanks and characters
# that are not seen. At the other marks, it may divide a cell, depending on the user's language.
_SIGNS = r"[=+\-@\uff1d\uff0b\uff0d\uff20\ufe66\ufe62\ufe63\ufe6b]"
_SKIPPED = r"[\s\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]"
_FORMULA = re.compile(rf"(?:{_SKIPPED}|;)*{_SIGNS}|[\t\r\n]")
_DIVIDED = re.compile(rf"(?<=[;\t\r\n])({_SKIPPED}*)(?={_SIGNS})")


def escape_formula(text: str) -> str:
    """Return ``text`` with an apostrophe before everything in it that a spreadsheet would read as a formula."""
    escaped = _DIVIDED.sub(r"\1'", text)
    return "'" + escaped if _FORMULA.match(text) else escaped
