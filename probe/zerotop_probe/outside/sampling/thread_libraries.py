"""Finds the threads of an OpenMP team: they have no name of their own, but they sleep in their library.

``/proc/PID/task/TID/syscall`` has the address from which a sleeping thread called the kernel. GNU's OpenMP library calls it
itself, where others leave that to the C library.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from zerotop_probe.outside import procfs
from zerotop_probe.recording import events

_LIBRARIES = (b"libgomp", b"libiomp", b"libomp")
# A thread that computes cannot be looked at, and one may sleep elsewhere for once. A look costs 5 us.
_LOOKS_PER_THREAD = 200
_READINGS_OF_MAPS = 3  # a library may be loaded late
_MAX_MAPS_BYTES = 4 << 20


class ThreadLibraries:
    """Records the OpenMP libraries of threads of one process."""

    def __init__(self, pid: int, write: Callable[..., object]) -> None:
        """``write`` takes the time, the class of an event, and its fields."""
        self._pid = pid
        self._write = write
        self._looks_left: dict[int, int] = {}  # by tid
        self._readings_left = _READINGS_OF_MAPS
        self._ranges: list[tuple[int, int, str]] = []  # begin, end, library

    def check_threads(self, names: Mapping[int, bytes]) -> None:
        """Look at those threads without a name that are not known yet. ``names`` are the kernel's, by tid."""
        unknown = [tid for tid in names if tid != self._pid and self._looks_left.get(tid, _LOOKS_PER_THREAD)]
        if not unknown:
            return
        program = procfs.read_file(f"/proc/{self._pid}/comm", 32).rstrip(b"\n")  # threads without a name have this one
        addresses: dict[int, int] = {}
        for tid in unknown:
            if names[tid] != program:
                self._looks_left[tid] = 0
                continue
            fields = procfs.read_file(f"/proc/{self._pid}/task/{tid}/syscall", 512).split()
            self._looks_left[tid] = self._looks_left.get(tid, _LOOKS_PER_THREAD) - 1
            if len(fields) > 2:  # else it runs, or may not be looked at
                addresses[tid] = int(fields[-1], 16)
        found = {tid: library for tid, address in addresses.items() if (library := self._find_library(address))}
        self._looks_left.update(dict.fromkeys(found, 0))
        if found:
            libraries = {str(tid): library for tid, library in found.items()}
            self._write(time.monotonic_ns(), events.ThreadNames, pid=self._pid, libraries=libraries)

    def _find_library(self, address: int) -> str:
        """Return the OpenMP library that has the address in its code; empty if none has."""
        for begin, end, library in self._ranges:
            if begin <= address < end:
                return library
        if not self._ranges and self._readings_left:
            self._readings_left -= 1
            self._ranges = _read_ranges(self._pid)
            return self._find_library(address) if self._ranges else ""
        return ""


def _read_ranges(pid: int) -> list[tuple[int, int, str]]:
    """Return the (begin, end, name) of the code of OpenMP libraries in a process."""
    ranges = []
    for line in procfs.read_file(f"/proc/{pid}/maps", _MAX_MAPS_BYTES).split(b"\n"):
        name = line.rpartition(b"/")[2]
        if name.startswith(_LIBRARIES) and b"x" in line[:80].split(b" ")[1]:
            begin, _, end = line.split(b" ", 1)[0].partition(b"-")
            ranges.append((int(begin, 16), int(end, 16), name.decode("ascii", "replace")))
    return ranges
