"""Blocks of a file beyond its text: giving them back, and keeping some for a disk that has run full."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02


def _load_fallocate() -> Callable[[int, int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None).fallocate
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    return function


_fallocate = _load_fallocate()


def punch_hole(descriptor: int, offset: int, length: int) -> None:
    """Gives back what a part of a file occupies; it reads as zeros then. Where that fails it stays."""
    # A failure costs memory and nothing else, so the result is not looked at.
    if _fallocate is not None:
        _fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, offset, length)


def reserve_blocks(descriptor: int | None, length: int) -> None:
    """Keeps blocks for the first ``length`` bytes of a file without changing its size, where the system can.

    What is then appended succeeds on a disk that others have filled meanwhile.
    """
    if descriptor is not None and _fallocate is not None:
        _fallocate(descriptor, _KEEP_SIZE, 0, length)


def release_reserve(descriptor: int | None) -> None:
    """Gives back the blocks that ``reserve`` kept and nobody needed."""
    if descriptor is not None:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size)
