"""Where the files of a recording lie: in a directory, or unpacked in memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zerotop.session.memory_map import MappedFile, choose_room, map_file

# A header line longer than this is not one of ours.
_MAX_HEADER_BYTES = 1 << 20


class Folder(Protocol):
    """Files by name. What cannot be read raises OSError."""

    path: Path
    can_grow: bool
    """Whether somebody may be writing."""

    def list_files(self) -> list[str]:
        """All files."""

    def file_size(self, name: str) -> int:
        """Bytes there are now."""

    def read_bytes(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """These bytes, or as many of them as there are."""

    def view_file(self, name: str) -> tuple[int, NDArray[np.uint8] | bytes]:
        """How many bytes there are now, and they, not copied; the same object as before where they lie in it.

        It may be longer than the file: what lies behind is not to be looked at.
        """


class Directory:
    """A session directory, as it is on disk at each moment.

    A live screen asks for every file five times a second, so this makes no paths and no file objects.
    """

    can_grow = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._prefix = os.path.join(path, "")
        self._room_bytes = choose_room(self._prefix)
        self._mapped: dict[str, MappedFile] = {}

    def list_files(self) -> list[str]:
        """All files."""
        return os.listdir(self.path)

    def file_size(self, name: str) -> int:
        """Bytes there are now."""
        return os.stat(self._prefix + name).st_size

    def read_bytes(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """These bytes, or as many of them as there are."""
        with open(self.path / name, "rb") as file:
            file.seek(begin)
            return file.read(-1 if end is None else max(0, end - begin))

    def view_file(self, name: str) -> tuple[int, NDArray[np.uint8]]:
        """How many bytes there are now, and they, mapped."""
        status, known = os.stat(self._prefix + name), self._mapped.get(name)
        if known is not None and known.covers_file(status):
            return status.st_size, known.array
        known = self._mapped[name] = map_file(self._prefix + name, self._room_bytes)
        return known.size, known.array


class UnpackedFolder:
    """The files of a packed recording, in memory."""

    can_grow = False

    def __init__(self, path: Path, files: dict[str, bytes]) -> None:
        self.path = path
        self._files = files

    def list_files(self) -> list[str]:
        """All files."""
        return list(self._files)

    def file_size(self, name: str) -> int:
        """Bytes of a file."""
        return len(self._get_file(name))

    def read_bytes(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """These bytes, or as many of them as there are."""
        return self._get_file(name)[begin:end]

    def view_file(self, name: str) -> tuple[int, bytes]:
        """A file's bytes and how many."""
        return self.file_size(name), self._get_file(name)

    def _get_file(self, name: str) -> bytes:
        try:
            return self._files[name]
        except KeyError:
            raise FileNotFoundError(name) from None


def read_first_line(folder: Folder, name: str) -> bytes:
    """A file's first line with its newline; without one where it is not yet whole, or too long to be a header."""
    size = 1 << 12
    while True:
        head = folder.read_bytes(name, 0, size)
        place = head.find(b"\n") + 1
        if place or len(head) < size or size >= _MAX_HEADER_BYTES:
            return head[:place] if place else head
        size = _MAX_HEADER_BYTES
