"""Escaping of text from jobs, recordings and other nodes before it reaches the terminal."""

from __future__ import annotations


def escape_unprintable(text: str) -> str:
    """Return ``text`` with control characters and line breaks as visible escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_escaped(text: str) -> None:
    """Print lines with their control characters as visible escapes."""
    print(*map(escape_unprintable, text.split("\n")), sep="\n")
