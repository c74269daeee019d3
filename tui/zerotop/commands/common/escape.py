"""What others wrote, as a terminal may have it."""

from __future__ import annotations


def escape_unprintable(text: str) -> str:
    """A job's words, a name from a recording or another node's answer stay on their line, a terminal's escapes in sight."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
