"""Files that the program writes for the user: all of one or nothing, also where the disk is full or we are killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Where to write what becomes ``path`` when that has gone well; else it is removed, and an error of it names ``path``.

    It has to be made anew ("x", O_EXCL): in a folder that others write to somebody may have laid a link there.
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


def write_text_file(path: Path, text: str) -> None:
    """Writes a small file of the program's own. Raises OSError."""
    with (
        write_atomically(path) as partial,
        open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream,
    ):
        stream.write(text)
