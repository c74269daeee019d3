"""Map files into memory without an open descriptor for each, and with room for the growth of the file.

``mmap.mmap`` keeps the file open while it is mapped (until Python 3.13 always), and a recording of 1,024 ranks has more
files than the usual limit of 1,024 open files. It also maps no more than the current size: opening and mapping each of those
files again took a quarter of the time of a live refresh.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.session.lost_pages import forget_mapping, guard_mapping
from zerotop_probe.recording.plain_files import open_plain_file

_ROOM = 1 << 16  # bytes mapped beyond a file's end: half a minute of a busy table, or more
# File systems whose mappings show data appended to the file, by their types in linux/magic.h: ext, XFS, tmpfs, Btrfs,
# overlay, ZFS. Others, notably NFS, look for data that other nodes have appended only when a file is mapped.
_COHERENT_FILE_SYSTEMS = {0xEF53, 0x58465342, 0x01021994, 0x9123683E, 0x794C7630, 0x2FC12FC1}
_STATFS_WORDS = 64  # larger than struct statfs on any architecture; the type comes first
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.statfs.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Mapping:
    """Mapped memory behind an array, unmapped with the last array that uses it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._size = size
        self._address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if self._address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "cannot be mapped")
        guard_mapping(self._address, size)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self._size,), "data": (self._address, True)}

    def __del__(self, munmap: Any = _libc.munmap, forget: Any = forget_mapping) -> None:
        if self._address != _MAP_FAILED:
            forget(self._address)
            munmap(self._address, self._size)


class MappedFile(NamedTuple):
    """A file mapped read-only: unread pages cost nothing, and a removed file stays readable."""

    device: int
    inode: int
    size: int  # when it was mapped
    array: NDArray[np.uint8]  # longer than the file: zeros follow the file's end, see :mod:`~zerotop.session.lost_pages`

    def covers_file(self, status: os.stat_result) -> bool:
        """Return whether this maps the whole file of this status, and not an earlier file of the same name."""
        return (self.device, self.inode) == (status.st_dev, status.st_ino) and status.st_size <= len(self.array)


def map_file(path: str, room: int = 0) -> MappedFile:
    """Map a file and ``room`` bytes beyond its end. Raise OSError if it cannot be opened or mapped."""
    descriptor = open_plain_file(path)
    try:
        status = os.fstat(descriptor)
        array = np.asarray(_Mapping(descriptor, status.st_size + room))
        return MappedFile(status.st_dev, status.st_ino, status.st_size, array)
    finally:
        os.close(descriptor)


def choose_room(folder: str) -> int:
    """Return the bytes to map beyond the ends of files: none if the file system would not show appended data there."""
    words = (ctypes.c_long * _STATFS_WORDS)()
    return _ROOM if _libc.statfs(os.fsencode(folder), words) == 0 and words[0] in _COHERENT_FILE_SYSTEMS else 0


def release_pages(array: NDArray[np.uint8]) -> None:
    """Release the pages of a mapped file that were read, which count to this process's memory; they can be read again."""
    _libc.madvise(array.ctypes.data, array.nbytes, mmap.MADV_DONTNEED)
