"""A node's files and how much of each the collector has: finds what is new, cut, replaced or deleted."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zerotop.commands.nodes.messages import (
    MAX_CHANGES,
    MAX_DATA_BYTES,
    FileChange,
    hash_bytes,
    hash_file,
    is_file_name,
    is_reduced_file,
)
from zerotop_probe.recording import segments
from zerotop_probe.recording.plain_files import open_plain_file

# A file whose last sent bytes are unchanged goes on: what cuts or replaces a file changes them, or its inode or size.
_TAIL_BYTES = 4096
# Full segments are only deleted: they are looked at once in so many scans.
_SCANS = 25


@dataclass
class _Sent:
    generation: int
    size: int = 0
    inode: int = 0
    modified_ns: int = -1
    tail: str = ""
    is_full: bool = False  # a later segment of its table was there already when it was last read


Batch = list[tuple[FileChange, bytes]]


class SentFiles:
    """The files of one node's recording that a collector has."""

    def __init__(self, folder: str, host: str) -> None:
        self._folder = folder
        self._host = host
        self._sent: dict[str, _Sent] = {}
        self._scans = 0

    def begin(self, listed: Iterable[tuple[str, int, str]]) -> None:
        """Begin with the files that the collector has: name, size and hash of each."""
        self._sent, self._scans = {}, 0
        for name, size, digest in listed:
            sent = self._sent[name] = _Sent(0)
            with contextlib.suppress(OSError):
                path = self._make_path(name)
                status = os.stat(path)
                if hash_file(path, size) == digest:
                    sent.size, sent.inode = size, status.st_ino
                    sent.tail = _hash_tail(path, size)
                else:
                    sent.inode = -1  # no file has it: replaced

    def find_changes(self, *, reduced: bool = False) -> Iterator[Batch]:
        """Yield the changes since the last call in messages' worth, files before deletions. Raise OSError.

        ``reduced``: only those of the files that nodes without full detail send; the others wait, each at its offset.

        Segments of a table come one after the other, since readers take a table for the records that they have together.
        Each counts as sent when the next one is asked for: after an error, begin again.
        """
        names = {name for name in os.listdir(self._folder) if is_file_name(name, self._host)}
        places = {name: segments.parse_name(name) or (name, 0) for name in names}
        full = {segments.make_name(stem, number - 1) for stem, number in places.values() if number}
        self._scans += 1
        batch: Batch = []
        room = MAX_DATA_BYTES
        for name in sorted(filter(is_reduced_file, names) if reduced else names, key=places.__getitem__):
            if name in full and self._scans % _SCANS and name in self._sent and self._sent[name].is_full:
                continue
            for change in self._read_changes(name):
                batch.append(change)
                room -= len(change[1])
                if room < MAX_DATA_BYTES // 2 or len(batch) == MAX_CHANGES:
                    yield batch
                    batch, room = [], MAX_DATA_BYTES
            if name in self._sent:
                self._sent[name].is_full = name in full
        for name in sorted(name for name in self._sent if name not in names):
            batch.append((FileChange(name, self._sent.pop(name).generation, 0, 0, -1), b""))
            if len(batch) == MAX_CHANGES:
                yield batch
                batch = []
        if batch:
            yield batch

    def _read_changes(self, name: str) -> Iterator[tuple[FileChange, bytes]]:
        try:
            descriptor = open_plain_file(self._make_path(name)) if self._has_changed(name) else -1
        except OSError:  # deleted meanwhile, which the next scan finds
            return
        if descriptor < 0:
            return
        with open(descriptor, "rb", buffering=0):
            status = os.fstat(descriptor)
            sent, tail = self._sent.get(name), b""
            if sent is not None and status.st_ino == sent.inode and status.st_size >= sent.size:
                tail = _read_tail(descriptor, sent.size)
            if sent is None or hash_bytes(tail) != sent.tail:
                sent, tail = self._begin_file(name, status.st_ino), b""
                yield FileChange(name, sent.generation, 0, 0, status.st_size), b""
            while sent.size < status.st_size:
                data = os.pread(descriptor, min(status.st_size - sent.size, MAX_DATA_BYTES // 2), sent.size)
                if not data:  # cut meanwhile
                    return
                change = FileChange(name, sent.generation, sent.size, len(data), status.st_size)
                sent.size += len(data)
                tail = (tail + data)[-_TAIL_BYTES:]
                sent.tail = hash_bytes(tail)
                yield change, data
            sent.inode, sent.modified_ns = status.st_ino, status.st_mtime_ns

    def _begin_file(self, name: str, inode: int) -> _Sent:
        """Begin a new file, or the next generation of one."""
        before = self._sent.get(name)
        sent = self._sent[name] = _Sent(0 if before is None else before.generation + 1, inode=inode, tail=hash_bytes(b""))
        return sent

    def _has_changed(self, name: str) -> bool:
        sent = self._sent.get(name)
        if sent is None:
            return True
        status = os.lstat(self._make_path(name))
        return (status.st_ino, status.st_size, status.st_mtime_ns) != (sent.inode, sent.size, sent.modified_ns)

    def _make_path(self, name: str) -> str:
        return os.path.join(self._folder, name)


def _read_tail(descriptor: int, size: int) -> bytes:
    length = min(_TAIL_BYTES, size)
    return os.pread(descriptor, length, size - length)


def _hash_tail(path: str, size: int) -> str:
    with open(open_plain_file(path), "rb") as file:
        return hash_bytes(_read_tail(file.fileno(), size))
