"""Storage of a recording's files: a directory, or memory after unpacking."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from itertools import pairwise
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.headers import RecordingError
from zerotop.recording.memory_map import MappedFiles, Mapping, choose_room, map_files
from zerotop_probe.recording.plain_files import open_plain_file
from zerotop_probe.recording.segments import PAGE_BYTES, count_records

# A longer first line is no header.
_MAX_HEADER_BYTES = 1 << 20
# A larger file that occupies less than this share of its size has nothing but holes.
_MAX_SPARSE_BYTES = 1 << 28
_MIN_OCCUPIED_SHARE = 1 / 64
_BLOCK_BYTES = 512  # the unit of st_blocks
# A segment is compared with its mapping once in this many calls that change nothing.
_CALLS_PER_CHECK = 8


class Folder(Protocol):
    """Files by name. All methods raise OSError for a file that cannot be read, or that is a link, a pipe or a device."""

    path: Path
    can_grow: bool
    """Whether a writer may add to the files."""
    cut_files: set[str]
    """Names of segments, other than the last ones of their tables, that have lost records at their end."""

    def list_files(self) -> list[str]:
        """Return the names of all files."""

    def file_size(self, name: str) -> int:
        """Return the current size of a file in bytes."""

    def read_bytes(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return these bytes, fewer at the end of the file."""

    def view_segments(
        self, names: tuple[str, ...], header_bytes: int, record_bytes: int
    ) -> tuple[int, NDArray[np.uint8] | bytes]:
        """Return the current size of a table's segments and their bytes, not copied, with only the first one's header.

        The object is the same as before if it covers the files. It may be longer: never access bytes after their end.
        """

    def release_files(self) -> None:
        """Let go of removed files, so that the file system can free them. All views read as zeros from now on."""


class Directory:
    """A recording folder on disk.

    Somebody else may have put anything there. A live screen checks every file five times a second: no call creates path or
    file objects without need.
    """

    can_grow = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._prefix = os.path.join(path, "")
        self._room_bytes = choose_room(self._prefix)
        self._mapped: dict[str, MappedFiles] = {}
        self._mappings = WeakSet[Mapping]()  # these, and earlier ones that are still in use
        self._calls = 0
        self.cut_files: set[str] = set()

    def list_files(self) -> list[str]:
        """Return the names of all files."""
        return os.listdir(self.path)

    def file_size(self, name: str) -> int:
        """Return the current size of a file in bytes."""
        return self._read_status(name).st_size

    def read_bytes(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return these bytes, fewer at the end of the file."""
        with open(open_plain_file(self._prefix + name), "rb") as file:
            size = _check_holes(os.fstat(file.fileno())).st_size
            # Not more than there is: Python reserves memory for all bytes that are asked for.
            begin, end = min(begin, size), size if end is None else min(end, size)
            file.seek(begin)
            return file.read(max(0, end - begin))

    def view_segments(self, names: tuple[str, ...], header_bytes: int, record_bytes: int) -> tuple[int, NDArray[np.uint8]]:
        """Return the current size of a table's segments and their bytes, memory-mapped.

        Raise RecordingError if one was cut short: what was computed from it may be of zeros.
        """
        status, mapped = self._read_status(names[-1]), self._mapped.get(names[0])
        if mapped is not None and mapped.covers_files(names, status):
            self._calls += 1
            if self._calls % _CALLS_PER_CHECK == 0 and len(names) > 1:
                self._check_length(mapped, self._calls // _CALLS_PER_CHECK % (len(names) - 1), header_bytes)
            return mapped.begins[-1] + status.st_size, mapped.array
        mapped = map_files(self._prefix, names, header_bytes, record_bytes, self._room_bytes, mapped)
        self._mapped[names[0]] = mapped
        if mapped.mapping is not None:
            self._mappings.add(mapped.mapping)
        self.cut_files.update(_find_cut(mapped, header_bytes, record_bytes))
        return mapped.size, mapped.array

    def release_files(self) -> None:
        """Let go of removed files. All views read as zeros from now on."""
        for mapping in self._mappings:
            mapping.release_files()

    def _check_length(self, mapped: MappedFiles, number: int, header_bytes: int) -> None:
        """Note if a file has become shorter than it is mapped: its lost records read as zeros."""
        name, size = mapped.names[number], mapped.begins[number + 1] - mapped.begins[number]
        with contextlib.suppress(OSError):  # it was folded and removed, and stays readable
            if os.lstat(self._prefix + name).st_size < header_bytes + size:
                raise RecordingError(f"{self._prefix}{name} was cut short while it was read: open the recording again.")

    def _read_status(self, name: str) -> os.stat_result:
        status = os.lstat(self._prefix + name)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", name)
        return status if status.st_size <= _MAX_SPARSE_BYTES else _check_holes(status)


def _find_cut(mapped: MappedFiles, header_bytes: int, record_bytes: int) -> list[str]:
    """Return the segments of a table that have lost records: all but the last are full.

    A cut at the end of a page is not noticed where no other segment is longer.
    """
    sizes = [end - begin for begin, end in pairwise((*mapped.begins, mapped.size - header_bytes))]  # of their records
    full = min(max(sizes), count_records(record_bytes) * record_bytes)
    return [name for name, size in zip(mapped.names, sizes[:-1], strict=False) if size < full or size % PAGE_BYTES]


def _check_holes(status: os.stat_result) -> os.stat_result:
    """Return the status of a file. Raise OSError if the file is huge but occupies almost nothing."""
    if status.st_size > _MAX_SPARSE_BYTES and status.st_blocks * _BLOCK_BYTES < status.st_size * _MIN_OCCUPIED_SHARE:
        raise OSError(errno.EFBIG, "it consists of holes")
    return status


class UnpackedFolder:
    """The files of a packed recording, in memory."""

    can_grow = False

    def __init__(self, path: Path, files: dict[str, bytes]) -> None:
        self.path = path
        self._files = files
        self.cut_files: set[str] = set()

    def list_files(self) -> list[str]:
        """Return the names of all files."""
        return list(self._files)

    def file_size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return len(self._get_file(name))

    def read_bytes(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return these bytes, fewer at the end of the file."""
        return self._get_file(name)[begin:end]

    def view_segments(self, names: tuple[str, ...], header_bytes: int, record_bytes: int) -> tuple[int, bytes]:
        """Return the size of a table's segments and their bytes."""
        content = self._get_file(names[0])
        if len(names) > 1:
            content += b"".join(self._get_file(name)[header_bytes:] for name in names[1:])
        return len(content), content

    def release_files(self) -> None:
        """Do nothing: all is in memory."""

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
