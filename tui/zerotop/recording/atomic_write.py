"""Write a user's file completely or not at all, even if the disk is full or the process is killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` after success. After an error it is removed; an OSError names ``path``.

    Create the file with "x" or O_EXCL: in a folder that others may write to, the path may be a link of somebody else.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        if str(error.filename) == str(partial):
            error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def write_text_file(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Write a small file that, by default, only the user can read. Raise OSError."""
    with (
        write_atomically(path) as partial,
        open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as stream,
    ):
        stream.write(text)
