"""``zerotop pack``: a recording as one small file, which every command reads like the recording."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import BinaryIO

from zerotop.analysis.formatting import format_bytes
from zerotop.commands.common.errors import Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.new_files import choose_file
from zerotop.commands.recordings import is_live
from zerotop.recording import catalog
from zerotop.recording.atomic_write import write_atomically
from zerotop.recording.packed.packing import SUFFIX, pack_folder
from zerotop.recording.reader import Recording
from zerotop.recording.storage import Directory

_MAX_TRIES = 3
_MAX_NAMES = 10  # of files that were left out


def pack(options: argparse.Namespace) -> int:
    """Write the file and print its size. Return 0."""
    path = catalog.find_recording(options.recording)
    if path.is_dir() and is_live(Recording.open(path)):
        print("The job is still running: packing the recording up to now.", file=sys.stderr)
    message, left_out = pack_recording(path, options.output, force=options.force)
    if left_out:
        more = [f"{len(left_out) - _MAX_NAMES} more"] if len(left_out) > _MAX_NAMES else []
        names = ", ".join([*left_out[:_MAX_NAMES], *more])
        print(f"Left out, not part of the recording: {escape_unprintable(names)}", file=sys.stderr)
    print(escape_unprintable(message))
    return 0


def pack_recording(path: Path, output: str | None, *, force: bool = False) -> tuple[str, list[str]]:
    """Pack a recording into ``output`` [RECORDING.zerotop in this directory].

    Return a message with the file's name and size, and the names of files that were left out. Raises Problem, RecordingError
    or OSError.
    """
    Recording.open(path)
    if path.is_file():
        raise Problem(f"{path} is already packed")
    target = choose_file(Path(output or f"{path.resolve().name}{SUFFIX}"), force)
    left_out = _write_checked(path, target)
    before = sum(file.lstat().st_size for file in path.iterdir())
    return f"{target}: {format_bytes(target.stat().st_size)}, from {format_bytes(before)}", left_out


def _pack_whole(path: Path, stream: BinaryIO) -> list[str]:
    """Pack a recording whose files may be folded and removed meanwhile. Raise OSError."""
    for tries_left in reversed(range(_MAX_TRIES)):
        stream.seek(0)
        stream.truncate()
        try:
            return pack_folder(Directory(path), stream)
        except FileNotFoundError:
            if not tries_left:
                raise
    raise AssertionError


def _write_checked(path: Path, target: Path) -> list[str]:
    """Pack into a file that only the user can read, and check that it opens."""
    with write_atomically(target) as partial:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            left_out = _pack_whole(path, stream)
        Recording.open(partial)
    return left_out
