"""Whether there is a terminal."""

from __future__ import annotations

import sys


def has_terminal() -> bool:
    """Whether a screen can be shown and keys be read."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()
