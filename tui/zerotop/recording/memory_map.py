"""Map files into memory without an open descriptor for each, and with room for the growth of the last one.

``mmap.mmap`` keeps the file open while it is mapped (until Python 3.13 always), and a recording of 1,024 ranks has more
files than the usual limit of 1,024 open files. It also maps no more than the current size: opening and mapping each of those
files again took a quarter of the time of a live refresh.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.lost_pages import forget_mapping, guard_mapping
from zerotop_probe.recording.plain_files import open_plain_file

_ROOM = 1 << 16  # bytes mapped beyond a file's end: half a minute of a busy table, or more
# File systems whose mappings show data appended to the file, by their types in linux/magic.h: ext, XFS, tmpfs, Btrfs,
# overlay, ZFS. Others, notably NFS, look for data that other nodes have appended only when a file is mapped.
_COHERENT_FILE_SYSTEMS = {0xEF53, 0x58465342, 0x01021994, 0x9123683E, 0x794C7630, 0x2FC12FC1}
_STATFS_WORDS = 64  # larger than struct statfs on any architecture; the type comes first
_KEPT_BYTES = 4 << 20  # columns of half a million records
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10
_REMAP_FIXED = 0x3  # MREMAP_MAYMOVE | MREMAP_FIXED

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
_libc.mmap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.mremap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.statfs.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Mapping:
    """Mapped memory behind an array, unmapped with the last array that uses it."""

    def __init__(self, size: int) -> None:
        """Reserve addresses. Parts that are not mapped with :meth:`map_range` read as zeros."""
        self._size = size
        self._address = _map_memory(None, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        guard_mapping(self._address, size)

    def map_range(self, begin: int, size: int, descriptor: int, offset: int) -> None:
        """Map a file's bytes from ``offset`` on; ``begin`` and ``offset`` are multiples of the page size."""
        _map_memory(self._address + begin, size, mmap.MAP_SHARED | _MAP_FIXED, descriptor, offset)

    def map_copy(self, begin: int, size: int, other: Mapping, other_begin: int) -> None:
        """Map the same file's bytes as another mapping; the file may have been removed."""
        # A size of 0 leaves the other mapping as it is.
        target = self._address + begin
        if _libc.mremap(other._address + other_begin, 0, size, _REMAP_FIXED, target) == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "cannot be mapped again")

    def release_files(self) -> None:
        """Read as zeros from now on: the file system can free files that were removed."""
        _map_memory(self._address, self._size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1, 0)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self._size,), "data": (self._address, True)}

    def __del__(self, munmap: Any = _libc.munmap, forget: Any = forget_mapping) -> None:
        if hasattr(self, "_address"):
            forget(self._address)
            munmap(self._address, self._size)


def _map_memory(address: int | None, size: int, flags: int, descriptor: int, offset: int) -> int:
    """Map memory read-only and return its address. Raise OSError."""
    mapped = int(_libc.mmap(address, size, mmap.PROT_READ, flags, descriptor, offset))
    if mapped == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "cannot be mapped")
    return mapped


class MappedFiles(NamedTuple):
    """Files mapped read-only, one after the other: unread pages cost nothing, and removed files stay readable.

    The headers of all but the first are left out, see :mod:`zerotop_probe.recording.segments`.
    """

    names: tuple[str, ...]
    device: int  # of the last file
    inode: int
    begins: tuple[int, ...]  # index of each file's first byte, as if its header were there
    size: int  # of all files when they were mapped
    array: NDArray[np.uint8]  # longer than the files: zeros follow their end, see :mod:`~zerotop.recording.lost_pages`
    mapping: Mapping | None  # None if the files were copied

    def covers_files(self, names: tuple[str, ...], last: os.stat_result) -> bool:
        """Return whether this maps all bytes of these files, and not an earlier file of the last one's name."""
        same = (self.device, self.inode) == (last.st_dev, last.st_ino) and self.names == names
        return same and self.begins[-1] + last.st_size <= len(self.array)


def map_files(
    folder: str,
    names: tuple[str, ...],
    header_bytes: int,
    record_bytes: int,
    room: int = 0,
    earlier: MappedFiles | None = None,
) -> MappedFiles:
    """Map the segments of a table, and ``room`` bytes beyond the end of the last one.

    Those that do not fill whole pages of this machine with whole records are copied to memory. Raise OSError if one
    cannot be read.

    Args:
        earlier: a mapping of the first ones of these files. All but its last file are taken from there, even if they were
            removed since.
    """
    kept = _find_kept(names, earlier)
    count = len(kept.names) - 1 if kept is not None else 0
    descriptors: list[int] = []
    try:
        for name in names[count:]:
            descriptors.append(open_plain_file(folder + name))
        status = [os.fstat(descriptor) for descriptor in descriptors]
        begins = [0] if kept is None else list(kept.begins)
        for one in status[:-1]:
            begins.append(begins[-1] + max(0, one.st_size - header_bytes))
        size = begins[-1] + status[-1].st_size
        place = MappedFiles(names, status[-1].st_dev, status[-1].st_ino, tuple(begins), size, _EMPTY, None)
        if any(begin % mmap.PAGESIZE or begin % record_bytes for begin in begins) or (
            len(names) > 1 and header_bytes % mmap.PAGESIZE
        ):
            return _copy_files(place, descriptors, header_bytes, record_bytes)
        mapping = Mapping(size + room)
        if kept is not None and kept.mapping is not None:
            for index, (begin, end) in enumerate(pairwise(begins[: count + 1])):
                offset = header_bytes if index else 0
                mapping.map_copy(begin + offset, end + header_bytes - begin - offset, kept.mapping, begin + offset)
        for index, (descriptor, one) in enumerate(zip(descriptors, status, strict=True), count):
            offset = header_bytes if index else 0
            length = one.st_size - offset + (room if index + 1 == len(names) else 0)
            if length > 0:
                mapping.map_range(begins[index] + offset, length, descriptor, offset)
        return place._replace(array=np.asarray(mapping), mapping=mapping)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _find_kept(names: tuple[str, ...], earlier: MappedFiles | None) -> MappedFiles | None:
    """Return the earlier mapping if it has several of these files and was not copied."""
    if earlier is None or earlier.mapping is None or names[: len(earlier.names)] != earlier.names:
        return None
    return earlier


_EMPTY = np.empty(0, np.uint8)


def _copy_files(place: MappedFiles, descriptors: list[int], header_bytes: int, record_bytes: int) -> MappedFiles:
    """Return the files' header and whole records in memory."""
    content, begins = os.pread(descriptors[0], header_bytes, 0), list[int]()
    for descriptor in descriptors:
        begins.append(len(content) - header_bytes)
        data = os.pread(descriptor, os.fstat(descriptor).st_size, header_bytes)
        content += data[: len(data) // record_bytes * record_bytes]
    return place._replace(begins=tuple(begins), size=len(content), array=np.frombuffer(content, np.uint8))


def choose_room(folder: str) -> int:
    """Return the bytes to map beyond the ends of files: none if the file system would not show appended data there."""
    words = (ctypes.c_long * _STATFS_WORDS)()
    return _ROOM if _libc.statfs(os.fsencode(folder), words) == 0 and words[0] in _COHERENT_FILE_SYSTEMS else 0


def release_pages(array: NDArray[np.uint8]) -> None:
    """Release the pages of a mapped file that were read, which count to this process's memory; they can be read again."""
    _libc.madvise(array.ctypes.data, array.nbytes, mmap.MADV_DONTNEED)


def keep_freed_memory() -> None:
    """Let the C library keep the memory of arrays that are freed, for the next ones.

    glibc keeps twice the size of the largest block that was freed so far, and returns the rest to the kernel. Clearing the
    pages that came back for new arrays took up to half the time of reading columns.
    """
    np.empty(_KEPT_BYTES, np.uint8)
