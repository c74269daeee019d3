"""Files mapped into memory without a descriptor for each.

``mmap.mmap`` keeps the file open for as long as it is mapped (until Python 3.13 always): a recording of 1,024 ranks has more
files than a shell's usual limit of 1,024 lets a process open.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Mapping:
    """Lies under an array and goes with the last that looks at it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._size = size
        self._address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if self._address == _FAILED:
            raise OSError(ctypes.get_errno(), "cannot be mapped")

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self._size,), "data": (self._address, True)}

    def __del__(self, munmap: Any = _libc.munmap) -> None:
        if self._address != _FAILED:
            munmap(self._address, self._size)


def mapped(path: str, size: int) -> NDArray[np.uint8]:
    """The first ``size`` bytes of a file, read-only: what is not looked at costs nothing, what is removed stays readable.

    Raises OSError where it cannot be opened or mapped, ValueError where it is shorter.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size < size:
            raise ValueError(f"{path} is shorter than {size} bytes")  # a look behind its end would end this process
        return np.asarray(_Mapping(descriptor, size))
    finally:
        os.close(descriptor)


def release(array: NDArray[np.uint8]) -> None:
    """Gives the memory of a mapped file back to the system, which has it on disk: pages that were read count as ours."""
    _libc.madvise(array.ctypes.data, array.nbytes, mmap.MADV_DONTNEED)
