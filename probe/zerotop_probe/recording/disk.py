"""Reserve disk blocks for a file in case the disk runs full."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable

_KEEP_SIZE = 0x01


def _load_fallocate() -> Callable[[int, int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None).fallocate
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    return function


_fallocate = _load_fallocate()


def reserve_blocks(descriptor: int | None, length: int) -> None:
    """Reserve blocks for the first ``length`` bytes of a file without changing its size, if the file system can.

    Writes to them succeed even after others have filled the disk.
    """
    if descriptor is not None and _fallocate is not None:
        _fallocate(descriptor, _KEEP_SIZE, 0, length)


def release_reserve(descriptor: int | None) -> None:
    """Free the blocks that :func:`reserve_blocks` reserved and that are still unused."""
    if descriptor is not None:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size)
