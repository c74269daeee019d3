"""Messages on standard error when a job has ended."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from zerotop.commands.common.escape import escape_unprintable


def write_messages(*sentences: str) -> None:
    """Writes lines to standard error. Where that is closed or full, the exit code stays what it was."""
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    text = "".join(f"zerotop: {escape_unprintable(sentence)}\n" for sentence in sentences)
    with suppress(OSError):
        os.write(2, text.encode(encoding, "backslashreplace"))
