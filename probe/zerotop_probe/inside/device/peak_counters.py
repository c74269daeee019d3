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
_READER_NAMES = ("_cuda_memoryStats", "_accelerator_getDeviceStats")
_RESETTER_NAMES = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")


class PeakCounters:
    """The peaks of one device. ``read_and_reset`` is ours; the job's own reads and resets come through the stand-ins."""

    def __init__(self, binding: Any, device: int) -> None:
        """``binding`` is ``torch._C``; ``device`` is the process's own ordinal. Raises AttributeError in a torch
        that has no such functions."""
        self._binding = binding
        self.device = device
        self._read_stats: Callable[[int], Stats] = getattr(binding, _READER_NAMES[0])
        self._reset_peaks: Callable[[int], None] = getattr(binding, _RESETTER_NAMES[0])
        self._originals: dict[str, Any] = {}
        # Re-entrant: a signal handler or a finalizer of the job may read in the middle of our own reading.
        self._lock = threading.RLock()
        # The highest that the job may see of each counter, in the order of :func:`_counters`. Empty when the
        # allocator's own peaks are the job's.
        self._job_peaks: list[int] = []
        # Our own window's peaks before a reset by the job itself.
        self._window_peaks: list[int] | None = None

    def install_functions(self) -> None:
        """Puts the stand-ins in place."""
        for name in _READER_NAMES:
            self._replace_function(name, self._read_for_job)
        for name in _RESETTER_NAMES:
            self._replace_function(name, self._reset_for_job)

    def _replace_function(self, name: str, stand_in: Callable[[Any, int], Any]) -> None:
        original = getattr(self._binding, name, None)
        if original is None:
            return
        self._originals[name] = original

        def call_replacement(device: int) -> Any:
            return stand_in(original, device)

        call_replacement.__name__ = name
        call_replacement.__doc__ = original.__doc__
        setattr(self._binding, name, call_replacement)

    def restore_functions(self) -> None:
        """Takes the stand-ins away, for a forked child: there is no CUDA in it, and the lock may be held by nobody."""
        for name, original in self._originals.items():
            setattr(self._binding, name, original)
        self._originals.clear()

    def read_stats(self) -> Stats:
        """The allocator's answer as it is, peaks since the last :meth:`read_and_reset`; resets nothing."""
        with self._lock:
            stats = self._read_stats(self.device)
            if self._window_peaks is not None:
                _raise_peaks(stats, self._window_peaks)
        return stats

    def read_and_reset(self) -> Stats:
        """The same, and the peaks begin anew."""
        with self._lock:
            stats = self._read_stats(self.device)
            self._reset_peaks(self.device)
            peaks = [counter["peak"] for counter in _list_counters(stats)]
            self._job_peaks = list(map(max, self._job_peaks, peaks)) if self._job_peaks else peaks
            if self._window_peaks is not None:
                _raise_peaks(stats, self._window_peaks)
                self._window_peaks = None
        return stats

    def _read_for_job(self, original: Callable[[int], Stats], device: int) -> Stats:
        if device != self.device:
            return original(device)
        with self._lock:
            stats = original(device)
            if self._job_peaks:
                _raise_peaks(stats, self._job_peaks)
        return stats

    def _reset_for_job(self, original: Callable[[int], None], device: int) -> None:
        if device != self.device:
            return original(device)
        with self._lock:
            stats = self._read_stats(device)
            original(device)
            self._job_peaks = []
            if self._window_peaks is not None:
                _raise_peaks(stats, self._window_peaks)
            self._window_peaks = [counter["peak"] for counter in _list_counters(stats)]
        return None


def _list_counters(stats: Stats) -> list[dict[str, int]]:
    """Every counter with a peak: those that are kept for each pool, and those that are kept once."""
    values = [value for value in stats.values() if value.__class__ is dict]
    return [counter for value in values for counter in ((value,) if "peak" in value else value.values())]


def _raise_peaks(stats: Stats, peaks: list[int]) -> None:
    for counter, peak in zip(_list_counters(stats), peaks):
        if peak > counter["peak"]:
            counter["peak"] = peak
