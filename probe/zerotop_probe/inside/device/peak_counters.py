"""The allocator's peak counters, begun anew by us at every boundary, while everybody else sees them untouched.

PyTorch keeps one peak for each of its counters. To know the peak of each phase it has to be reset at the phase's
edges; what the job itself reads through torch.cuda, torch.accelerator or DeepSpeed's ``see_memory_usage`` has to be
what it would have read without us. All of them ask the functions of ``torch._C`` that are replaced here, by name and
at the time of the call. Readers in C++ would not be fooled; PyTorch has none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Stats = dict[str, Any]

# By the name in ``torch._C``; the second pair is what torch.accelerator uses, from torch 2.9 on.
_READERS = ("_cuda_memoryStats", "_accelerator_getDeviceStats")
_RESETTERS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")


class Peaks:
    """The peaks of one device. ``read_and_reset`` is ours; the job's own reads and resets come through the stand-ins."""

    def __init__(self, binding: Any, device: int) -> None:
        """``binding`` is ``torch._C``; ``device`` is the process's own ordinal. Raises AttributeError in a torch
        that has no such functions."""
        self._binding = binding
        self.device = device
        self._read: Callable[[int], Stats] = getattr(binding, _READERS[0])
        self._reset: Callable[[int], None] = getattr(binding, _RESETTERS[0])
        self._originals: dict[str, Any] = {}
        # Re-entrant: a signal handler or a finalizer of the job may read in the middle of our own reading.
        self._lock = threading.RLock()
        # The highest that the job may see of each counter, in the order of :func:`_counters`. Empty when the
        # allocator's own peaks are the job's.
        self._highest: list[int] = []
        # Our own window's peaks before a reset by the job itself.
        self._before: list[int] | None = None

    def install(self) -> None:
        """Puts the stand-ins in place."""
        for name in _READERS:
            self._replace(name, self._job_reads)
        for name in _RESETTERS:
            self._replace(name, self._job_resets)

    def _replace(self, name: str, stand_in: Callable[[Any, int], Any]) -> None:
        original = getattr(self._binding, name, None)
        if original is None:
            return
        self._originals[name] = original

        def call(device: int) -> Any:
            return stand_in(original, device)

        call.__name__ = name
        call.__doc__ = original.__doc__
        setattr(self._binding, name, call)

    def remove(self) -> None:
        """Takes the stand-ins away, for a forked child: there is no CUDA in it, and the lock may be held by nobody."""
        for name, original in self._originals.items():
            setattr(self._binding, name, original)
        self._originals.clear()

    def read(self) -> Stats:
        """The allocator's answer as it is, peaks since the last :meth:`read_and_reset`; resets nothing."""
        with self._lock:
            stats = self._read(self.device)
            if self._before is not None:
                _raise(stats, self._before)
        return stats

    def read_and_reset(self) -> Stats:
        """The same, and the peaks begin anew."""
        with self._lock:
            stats = self._read(self.device)
            self._reset(self.device)
            peaks = [counter["peak"] for counter in _counters(stats)]
            self._highest = list(map(max, self._highest, peaks)) if self._highest else peaks
            if self._before is not None:
                _raise(stats, self._before)
                self._before = None
        return stats

    def _job_reads(self, original: Callable[[int], Stats], device: int) -> Stats:
        if device != self.device:
            return original(device)
        with self._lock:
            stats = original(device)
            if self._highest:
                _raise(stats, self._highest)
        return stats

    def _job_resets(self, original: Callable[[int], None], device: int) -> None:
        if device != self.device:
            return original(device)
        with self._lock:
            stats = self._read(device)
            original(device)
            self._highest = []
            if self._before is not None:
                _raise(stats, self._before)
            self._before = [counter["peak"] for counter in _counters(stats)]
        return None


def _counters(stats: Stats) -> list[dict[str, int]]:
    """Every counter with a peak: those that are kept for each pool, and those that are kept once."""
    values = [value for value in stats.values() if value.__class__ is dict]
    return [counter for value in values for counter in ((value,) if "peak" in value else value.values())]


def _raise(stats: Stats, seen: list[int]) -> None:
    for counter, peak in zip(_counters(stats), seen):
        if peak > counter["peak"]:
            counter["peak"] = peak
