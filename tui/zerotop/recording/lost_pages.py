"""Keep this process alive when a mapped file is cut short while it is read.

The kernel answers an access to a page beyond the end of the file with SIGBUS, which ends a process. No check beforehand is
safe, because the file can shrink right after it. Reading instead of mapping would be safe, but would copy all records to
memory: 480 MB for ten million spans. So the signal is handled: the lost pages are replaced by pages of zeros, and the access
is repeated. The reader notices at its next refresh that the file is shorter.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import signal
import sys
from typing import Any

_SIGINFO, _RESTART = 0x4, 0x10000000  # SA_SIGINFO and SA_RESTART
_ADDRESS_OFFSET = 16  # of si_addr in siginfo_t, on machines with 64 bits
_FIXED = 0x10  # MAP_FIXED

_libc = ctypes.CDLL(None, use_errno=True)
_mappings: dict[int, int] = {}  # sizes by address


class _SignalAction(ctypes.Structure):
    """``struct sigaction`` of glibc and musl on machines with 64 bits."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_previous_action = _SignalAction()


def guard_mapping(address: int, size: int) -> None:
    """Replace pages of this mapping by zeros once its file lost them."""
    _install_handler()
    _mappings[address] = size


def forget_mapping(address: int) -> None:
    """Call this before the memory is unmapped."""
    _mappings.pop(address, None)


def _handle_bus_error(number: int, info: int, context: int) -> None:
    address = ctypes.c_uint64.from_address(info + _ADDRESS_OFFSET).value
    for begin, size in list(_mappings.items()):
        if begin <= address < begin + size:
            lost = address - address % mmap.PAGESIZE
            _libc.mmap(lost, begin + size - lost, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED, -1, 0)
            return
    # Not ours: the access is repeated and ends the process as it would have without us.
    _libc.sigaction(number, ctypes.byref(_previous_action), None)


_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(_handle_bus_error)


@functools.cache
def _install_handler() -> None:
    """Install the handler, unless pointers have another size than the structures here."""
    if sys.maxsize < 1 << 32:
        return
    _libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
    _libc.mmap.restype = ctypes.c_void_p
    action: Any = _SignalAction(ctypes.cast(_callback, ctypes.c_void_p), flags=_SIGINFO | _RESTART)
    _libc.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(_previous_action))
