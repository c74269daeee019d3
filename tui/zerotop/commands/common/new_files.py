"""Files that commands write for the user: none replaces another without ``--force``."""

from __future__ import annotations

from pathlib import Path

from zerotop.commands.common.errors import Problem


def choose_file(path: Path, force: bool) -> Path:
    """Return the path. Raise Problem if a file is there, unless it may be replaced; devices and pipes are written to."""
    if path.is_file() and not force:
        raise Problem(f"{path} already exists: add --force to replace it, or name another file with -o FILE")
    return path


def find_free_path(path: Path) -> Path:
    """Return the path, or one with a number where a file is there: ``report-2.html``."""
    number, free = 1, path
    while free.is_file():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free
