"""Small files of the program's own, beside the recordings."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file for the user's eyes: all of it or nothing. Raises OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
            stream.write(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
