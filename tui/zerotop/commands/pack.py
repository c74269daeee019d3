"""``zerotop pack``: a session as one small file, which every command reads as it reads the session."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from zerotop.commands.common.errors import Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.sessions import is_live
from zerotop.session import catalog
from zerotop.session.atomic_write import write_atomically
from zerotop.session.packing import SUFFIX
from zerotop.session.packing import pack_folder as write_packed
from zerotop.session.reader import Session
from zerotop.session.storage import Directory

_KIB = 1 << 10


def pack(options: argparse.Namespace) -> int:
    """Writes the file, says how large it is. Returns 0."""
    path = catalog.find_session(options.session)
    if path.is_dir() and is_live(Session.open(path)):
        print("The job still runs: what was recorded up to now is packed.", file=sys.stderr)
    said, left_out = pack_session(path, options.output)
    if left_out:
        print(f"Left out, no part of the recording: {escape_unprintable(', '.join(left_out))}", file=sys.stderr)
    print(escape_unprintable(said))
    return 0


def pack_session(path: Path, chosen: str | None) -> tuple[str, list[str]]:
    """Packs a session into the ``chosen`` file, or one in this directory.

    Returns which, and how large it is, and the names of what was left out. Raises Problem, SessionError or OSError.
    """
    Session.open(path)
    if path.is_file():
        raise Problem(f"{path} is packed already")
    output = Path(chosen or f"{path.resolve().name}{SUFFIX}")
    if output.exists():
        raise Problem(f"{output} exists already: name another file with -o FILE")
    left_out = _write_checked(path, output)
    before = sum(file.stat().st_size for file in path.iterdir())
    return f"{output}: {output.stat().st_size / _KIB:.0f} KiB, from {before / _KIB:.0f} KiB", left_out


def _write_checked(path: Path, output: Path) -> list[str]:
    """Packs for the user's eyes, as the session is, and looks whether it can be read."""
    with write_atomically(output) as partial:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            left_out = write_packed(Directory(path), stream)
        Session.open(partial)
    return left_out
