"""Terminal detection."""

from __future__ import annotations

import sys


def has_terminal() -> bool:
    """Whether standard input and output are a terminal, so that the screen can be shown."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()
