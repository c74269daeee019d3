"""Storage of a recording's files: a directory, or memory after unpacking."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zerotop.session.memory_map import MappedFile, choose_room, map_file

# A longer first line is no header.
_MAX_HEADER_BYTES = 1 << 20


class Folder(Protocol):
    """Files by name. All methods raise OSError for a file that cannot be read."""

    path: Path
    can_grow: bool
    """Whether a writer may add to the files."""

    def list_files(self) -> list[str]:
        """Return the names of all files."""

    def file_size(self, name: str) -> int:
        """Return the current size of a file in bytes."""

    def read_bytes(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return these bytes, fewer at the end of the file."""

    def view_file(self, name: str) -> tuple[int, NDArray[np.uint8] | bytes]:
        """Return the current size of a file and its bytes, not copied; the same object as before if it covers the file.

        The object may be longer than the file: never access bytes after the file's end.
        """


class Directory:
    """A session directory on disk.

    A live screen checks every file five times a second: no call creates path or file objects without need.
    """

    can_grow = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._prefix = os.path.join(path, "")
        self._room_bytes = choose_room(self._prefix)
        self._mapped: dict[str, MappedFile] = {}

    def list_files(self) -> list[str]:
        """Return the names of all files."""
        return os.listdir(self.path)

    def file_size(self, name: str) -> int:
        """Return the current size of a file in bytes."""
        return os.stat(self._prefix + name).st_size

    def read_bytes(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return these bytes, fewer at the end of the file."""
        with open(self.path / name, "rb") as file:
            file.seek(begin)
            return file.read(-1 if end is None else max(0, end - begin))

    def view_file(self, name: str) -> tuple[int, NDArray[np.uint8]]:
        """Return the current size of a file and its bytes, memory-mapped."""
        status, mapped = os.stat(self._prefix + name), self._mapped.get(name)
        if mapped is not None and mapped.covers_file(status):
            return status.st_size, mapped.array
        mapped = self._mapped[name] = map_file(self._prefix + name, self._room_bytes)
        return mapped.size, mapped.array


class UnpackedFolder:
    """The files of a packed recording, in memory."""

    can_grow = False

    def __init__(self, path: Path, files: dict[str, bytes]) -> None:
        self.path = path
        self._files = files

    def list_files(self) -> list[str]:
        """Return the names of all files."""
        return list(self._files)

    def file_size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return len(self._get_file(name))

    def read_bytes(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return these bytes, fewer at the end of the file."""
        return self._get_file(name)[begin:end]

    def view_file(self, name: str) -> tuple[int, bytes]:
        """Return the size of a file and its bytes."""
        return self.file_size(name), self._get_file(name)

    def _get_file(self, name: str) -> bytes:
        try:
            return self._files[name]
        except KeyError:
            raise FileNotFoundError(name) from None


def read_first_line(folder: Folder, name: str) -> bytes:
    """Return a file's first line with its newline; without one if it is incomplete, or too long for a header."""
    size = 1 << 12
    while True:
        head = folder.read_bytes(name, 0, size)
        end = head.find(b"\n") + 1
        if end or len(head) < size or size >= _MAX_HEADER_BYTES:
            return head[:end] if end else head
        size = _MAX_HEADER_BYTES
