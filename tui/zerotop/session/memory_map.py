"""Files mapped into memory: without a descriptor for each, and with room for what will be added.

``mmap.mmap`` keeps the file open for as long as it is mapped (until Python 3.13 always): a recording of 1,024 ranks has more
files than a shell's usual limit of 1,024 lets a process open. And it maps no more than there is: each of those files would
be opened and mapped anew at every look, which took a quarter of it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_ROOM = 1 << 16  # bytes mapped behind a file's end: half a minute of a busy table, or more
# File systems that show in a mapping what is added to its file, by the types of linux/magic.h: ext, XFS, tmpfs, Btrfs,
# overlay, ZFS. Others, NFS above all, look for what other nodes have added when a file is mapped, and only then.
_COHERENT_FILE_SYSTEMS = {0xEF53, 0x58465342, 0x01021994, 0x9123683E, 0x794C7630, 0x2FC12FC1}
_STATFS_WORDS = 64  # more than it has anywhere, the type first
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.statfs.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Mapping:
    """Lies under an array and goes with the last that looks at it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._size = size
        self._address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if self._address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "cannot be mapped")

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self._size,), "data": (self._address, True)}

    def __del__(self, munmap: Any = _libc.munmap) -> None:
        if self._address != _MAP_FAILED:
            munmap(self._address, self._size)


class MappedFile(NamedTuple):
    """A file that was mapped, read-only: what is not looked at costs nothing, what is removed stays readable."""

    device: int
    inode: int
    size: int  # when it was
    array: NDArray[np.uint8]  # with room: a look behind the file's end would end this process

    def covers_file(self, status: os.stat_result) -> bool:
        """Whether it is the file of this status, not one that had its name before, and all of it lies within."""
        return (self.device, self.inode) == (status.st_dev, status.st_ino) and status.st_size <= len(self.array)


def map_file(path: str, room: int = 0) -> MappedFile:
    """Maps a file and so many bytes more. Raises OSError where it cannot be opened or mapped."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        array = np.asarray(_Mapping(descriptor, status.st_size + room))
        return MappedFile(status.st_dev, status.st_ino, status.st_size, array)
    finally:
        os.close(descriptor)


def choose_room(folder: str) -> int:
    """How many bytes to map behind the ends of files there: none where what is added would not be seen in them."""
    told = (ctypes.c_long * _STATFS_WORDS)()
    return _ROOM if _libc.statfs(os.fsencode(folder), told) == 0 and told[0] in _COHERENT_FILE_SYSTEMS else 0


def release_pages(array: NDArray[np.uint8]) -> None:
    """Gives the memory of a mapped file back to the system, which has it on disk: pages that were read count as ours."""
    _libc.madvise(array.ctypes.data, array.nbytes, mmap.MADV_DONTNEED)
