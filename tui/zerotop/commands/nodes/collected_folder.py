"""The collector's folder: applies the changes of nodes' files, each at its offset, and compares what is there already."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from zerotop.commands.nodes.messages import MAX_CHANGES, BadMessage, FileChange, hash_file, is_file_name

_PARTIAL = ".partial"
# What a file takes on disk at least.
_FILE_BYTES = 4096
# A page of the list ends after so many bytes, whose hashes take less than a second.
_PAGE_BYTES = 1 << 28
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class OutOfStep(Exception):
    """The node assumes another state of a file: it has to ask for the list again."""


@dataclass
class _File:
    generation: int = 0
    # Of a generation of which not all bytes have come.
    next_generation: int | None = None


@dataclass
class NodeFiles:
    """The files of one node."""

    folder: str
    host: str
    max_bytes: int
    _files: dict[str, _File] = field(default_factory=dict)
    _bytes: int = 0

    def begin(self) -> None:
        """Begin with generation 0 of every file that is there, and without unfinished ones."""
        self._files, self._bytes = {}, 0
        for name in (name for name in os.listdir(self.folder) if f"-{self.host}-" in name):  # of a thousand nodes' files
            if name.endswith(_PARTIAL) and is_file_name(name.removesuffix(_PARTIAL), self.host):
                os.unlink(self._make_path(name))
            elif is_file_name(name, self.host):
                self._files[name] = _File()
                self._bytes += os.lstat(self._make_path(name)).st_size + _FILE_BYTES

    def list_page(self, after: str) -> list[tuple[str, int, str]]:
        """Return the next files by name after one: (name, size, hash). Raise OSError."""
        page, listed_bytes = [], 0
        for name in sorted(name for name in self._files if name > after):
            size = os.lstat(self._make_path(name)).st_size
            page.append((name, size, hash_file(self._make_path(name), size) or ""))
            listed_bytes += size
            if listed_bytes > _PAGE_BYTES or len(page) == MAX_CHANGES:
                break
        return page

    def apply(self, changes: Sequence[tuple[FileChange, bytes]]) -> None:
        """Apply changes in order; those that were applied before change nothing. Raise OutOfStep, BadMessage, OSError."""
        for change, data in changes:
            if change.size < 0:
                self._delete(change)
            elif change.generation == self._get_generation(change):
                self._bytes += self._write(change.name, change.offset, data)
            else:
                self._replace(change, data)

    def _get_generation(self, change: FileChange) -> int:
        file = self._files.get(change.name)
        if file is None:
            if change.offset:
                raise OutOfStep
            self._check_room(_FILE_BYTES)
            self._bytes += _FILE_BYTES
            file = self._files[change.name] = _File(change.generation)
        if change.generation < file.generation:
            raise OutOfStep
        return file.generation

    def _delete(self, change: FileChange) -> None:
        if self._files.pop(change.name, None) is None:  # deleted before
            return
        self._bytes -= _FILE_BYTES
        for name in (change.name, change.name + _PARTIAL):
            self._remove(name)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            size = os.lstat(self._make_path(name)).st_size
            os.unlink(self._make_path(name))
            self._bytes -= size

    def _replace(self, change: FileChange, data: bytes) -> None:
        """Write the next generation beside the file, and put it into its place when all of it has come."""
        file, partial = self._files[change.name], change.name + _PARTIAL
        if change.generation != file.next_generation:
            if change.offset:
                raise OutOfStep
            self._remove(partial)
            file.next_generation = change.generation
        self._bytes += self._write(partial, change.offset, data)
        if change.offset + len(data) >= change.size:
            with contextlib.suppress(FileNotFoundError):
                self._bytes -= os.lstat(self._make_path(change.name)).st_size
            os.replace(self._make_path(partial), self._make_path(change.name))
            file.generation, file.next_generation = change.generation, None

    def _write(self, name: str, offset: int, data: bytes) -> int:
        """Write what is new of ``data``; return the number of bytes. Raise OutOfStep if others are there, or are missing."""
        descriptor = os.open(self._make_path(name), _FLAGS | os.O_CREAT, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            known = data[: max(0, size - offset)]
            if offset > size or (known and os.pread(descriptor, len(known), offset) != known):
                raise OutOfStep
            new = data[len(known) :]
            self._check_room(len(new))
            return _append(descriptor, new, max(offset, size)) if new else 0
        finally:
            os.close(descriptor)

    def _check_room(self, more: int) -> None:
        if self._bytes + more > self.max_bytes:
            raise BadMessage(
                f"the recording of node {self.host} is larger than {self.max_bytes / 1e6:.0f} MB:"
                " collect with a larger --max-size"
            )

    def _make_path(self, name: str) -> str:
        return os.path.join(self.folder, name)


def _append(descriptor: int, data: bytes, size: int) -> int:
    written = 0
    while written < len(data):
        count = os.pwrite(descriptor, data[written:], size + written)
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += count
    return written
