"""Reset the allocator's peak counters at every boundary without changing the values that the job reads.

PyTorch keeps one peak for each counter. To measure the peak of a phase, it must be reset at the edges of the phase. Yet the
job must read the same values through torch.cuda, torch.accelerator or DeepSpeed's ``see_memory_usage`` as without the probe.
All of these look up functions of ``torch._C`` by name at each call, and those functions are replaced here. A reader in C++
would see the reset peaks; PyTorch has none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import chain
from operator import itemgetter
from typing import Any

from zerotop_probe.recording.interruptions import hide_frames

Stats = dict[str, Any]

# Names in ``torch._C``; torch.accelerator uses the second of each, from torch 2.9 on.
_READER_NAMES = ("_cuda_memoryStats", "_accelerator_getDeviceStats")
_RESETTER_NAMES = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")


class PeakCounters:
    """The peaks of one device. The probe calls ``read_and_reset``; the job's reads and resets go through replacements."""

    def __init__(self, binding: Any, device: int) -> None:
        """``binding`` is ``torch._C``, ``device`` the CUDA ordinal in this process.

        Raise AttributeError if this torch has no such functions.
        """
        self._binding = binding
        self.device = device
        self._read_stats: Callable[[int], Stats] = getattr(binding, _READER_NAMES[0])
        self._reset_peaks: Callable[[int], None] = getattr(binding, _RESETTER_NAMES[0])
        self._originals: dict[str, Any] = {}
        # Re-entrant: a signal handler or a finalizer of the job may read during a read of the probe.
        self._lock = threading.RLock()
        # The peak of each counter that the job must see, in the order of :func:`_list_counters`. Empty if the allocator's
        # own peaks are right for the job.
        self._job_peaks: list[int] = []
        # The probe's peaks of the current window before a reset by the job.
        self._window_peaks: list[int] | None = None

    def install_functions(self) -> None:
        """Replace the functions."""
        for name in _READER_NAMES:
            self._replace_function(name, self._read_for_job)
        for name in _RESETTER_NAMES:
            self._replace_function(name, self._reset_for_job)

    def _replace_function(self, name: str, replacement: Callable[[Any, int], Any]) -> None:
        original = getattr(self._binding, name, None)
        if original is None:
            return
        self._originals[name] = original

        def call_replacement(device: int) -> Any:
            try:
                return replacement(original, device)
            except BaseException as error:
                hide_frames(error)
                raise

        call_replacement.__name__ = name
        call_replacement.__doc__ = original.__doc__
        setattr(self._binding, name, call_replacement)

    def restore_functions(self) -> None:
        """Restore the functions in a forked child: it has no CUDA, and no thread that would release the lock."""
        for name, original in self._originals.items():
            setattr(self._binding, name, original)
        self._originals.clear()

    def read_stats(self) -> Stats:
        """Return the counters with the peaks since the last :meth:`read_and_reset`, without a reset."""
        with self._lock:
            stats = self._read_stats(self.device)
            if self._window_peaks is not None:
                _raise_peaks(stats, self._window_peaks)
        return stats

    def read_and_reset(self) -> Stats:
        """Return the same and reset the peaks."""
        with self._lock:
            stats = self._read_stats(self.device)
            try:
                self._reset_peaks(self.device)
            finally:  # a signal handler of the job may raise
                peaks = list(map(_get_peak, _list_counters(stats)))
                self._job_peaks = [a if a > b else b for a, b in zip(self._job_peaks, peaks)] or peaks
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
            self._window_peaks = list(map(_get_peak, _list_counters(stats)))
        return None


_get_peak = itemgetter("peak")


# The names of this torch's counters, with and without pools: one entry, whose key is all names.
_names_by_keys: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}


def _list_counters(stats: Stats) -> list[dict[str, int]]:
    """Return every counter with a peak: those of each pool, then those without pools."""
    keys = tuple(stats)
    names = _names_by_keys.get(keys)
    if names is None:
        names = _names_by_keys[keys] = _sort_names(stats)
    pooled, single = names
    counters = list(chain.from_iterable(map(dict.values, map(stats.__getitem__, pooled))))
    counters += map(stats.__getitem__, single)
    return counters


def _sort_names(stats: Stats) -> tuple[list[str], list[str]]:
    counted = [name for name, value in stats.items() if value.__class__ is dict]
    return [name for name in counted if "peak" not in stats[name]], [name for name in counted if "peak" in stats[name]]


def _raise_peaks(stats: Stats, peaks: list[int]) -> None:
    for counter, peak in zip(_list_counters(stats), peaks):
        if peak > counter["peak"]:
            counter["peak"] = peak
