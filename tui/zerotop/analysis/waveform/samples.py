"""The time that each sensor's samples cover: the window that a value is the mean of, or the moment of the reading.

- GPU utilization: NVML updates it every 200 ms to the share of those 200 ms in which a kernel ran. The sampler reads it
  every 100 ms, so a new value was updated at any moment since the reading before: see ``slack_ns``.
- Power: the device's draw at NVML's last update, every 100 ms: a reading may be that old. Readings that change too slowly
  for that are taken for the driver's one-second average, which older GPUs report; at constant power the two are the same.
- PCIe: bytes between two readings of the counters, 50 to 500 ms apart: the less traffic, the fewer readings.
- Cores: processor time between two samples.
- Allocated memory: exact where a phase begins or ends, and ten times a second in between.
- Resident memory: ten times a second.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.reader import Recording, Source
from zerotop.recording.samples import Floats, Ints, Rows, iter_samples

_RENEWED_NS = 200_000_000
_SECOND_NS = 1_000_000_000
_TICK_NS = 100_000_000  # between readings of the sampler, and between updates of power
_DRAWN_NS = 20_000_000  # window of an instantaneous power reading: its curves are about that sharp
# Window of a reading of a moment: windows need a length, and this one is shorter than a bin of the fold.
_MOMENT_NS = 1_000_000
# A one-second average changes in a second by at most its highest value; instantaneous power changes faster. With a margin.
_AVERAGE_CHANGE = 1.5
# Means over longer intervals, of a delayed sampler, cannot resolve positions in an iteration.
_HELD_UP_NS = 1_500_000_000


class SampleWindows(NamedTuple):
    """Samples: each value is the mean over its window, in unix nanoseconds."""

    begins_ns: Ints
    ends_ns: Ints
    values: Floats
    slack_ns: int = 0  # all windows may be earlier by up to this
    moments: bool = False  # values are readings at ``ends_ns``

    def select(self, chosen: NDArray[np.intp] | NDArray[np.bool_] | slice) -> SampleWindows:
        begins_ns, ends_ns, values = self.begins_ns[chosen], self.ends_ns[chosen], self.values[chosen]
        return self._replace(begins_ns=begins_ns, ends_ns=ends_ns, values=values)

    @property
    def length_s(self) -> float:
        """Median length of the windows."""
        return float(np.median(self.ends_ns - self.begins_ns)) / 1e9 if len(self.values) else 0.0


NO_WINDOWS = SampleWindows(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))


def merge_windows(parts: Iterable[SampleWindows]) -> SampleWindows:
    """Join the windows of several tables."""
    filled = [part for part in parts if len(part.values)]
    if len(filled) < 2:
        return filled[0] if filled else NO_WINDOWS
    begins, ends, values = (np.concatenate(columns) for columns in zip(*(part[:3] for part in filled), strict=True))
    return SampleWindows(begins, ends, values, max(part.slack_ns for part in filled), filled[0].moments)


def read_gpu_windows(recording: Recording, host: str, index: int, begin_ns: int, end_ns: int) -> dict[str, SampleWindows]:
    """Read ``utilization`` (percent), ``power`` (watts), ``to_host`` and ``to_gpu`` (bytes per second) of a GPU."""
    parts: dict[str, list[SampleWindows]] = {"utilization": [], "power": [], "to_host": [], "to_gpu": []}
    for times, rows in iter_samples(recording.host_sources("gpus", host), begin_ns - 1, end_ns, "gpu", index):
        parts["utilization"].append(_build_utilization(times, rows))
        parts["power"].append(_build_power(times, rows["power_w"].astype(np.float64)))
        parts["to_host"].append(_build_traffic(times, rows["pcie_tx_bytes"]))
        parts["to_gpu"].append(_build_traffic(times, rows["pcie_rx_bytes"]))
    return {name: merge_windows(windows) for name, windows in parts.items()}


def read_process_windows(
    recording: Recording, host: str, pids: Collection[int], begin_ns: int, end_ns: int
) -> dict[str, SampleWindows]:
    """Read ``cores`` and ``resident`` (bytes) summed over processes of a host, where all of them were sampled."""
    parts: dict[str, list[SampleWindows]] = {"cores": [], "resident": []}
    for times, rows in iter_samples(recording.host_sources("processes", host), begin_ns - 1, end_ns):
        chosen = np.isin(rows["pid"], list(pids)) if len(pids) > 1 else rows["pid"] == next(iter(pids), -1)
        times, first, counts = np.unique(times[chosen], return_index=True, return_counts=True)
        if not len(times):
            continue
        cores, resident = (
            np.add.reduceat(rows[name][chosen].astype(np.float64), first) for name in ("cores_used", "rss_bytes")
        )
        complete = counts == counts.max()  # ticks in which all processes were sampled
        usable = complete[1:] & complete[:-1] & (np.diff(times) < _HELD_UP_NS) & np.isfinite(cores[1:])
        parts["cores"].append(SampleWindows(times[:-1][usable], times[1:][usable], cores[1:][usable]))
        parts["resident"].append(_build_moments(times[complete], resident[complete]))
    return {name: merge_windows(windows) for name, windows in parts.items()}


def count_runnable_threads(
    recording: Recording, host: str, pids: Collection[int], begin_ns: int, end_ns: int
) -> tuple[float, float]:
    """Return the most threads that ran or waited for a core in one sample, of these processes together, and the seconds
    after which a thread is counted: half of a sample. NaN where nothing was sampled.
    """
    highest, longest_ns = 0.0, 0.0
    for times, rows in iter_samples(recording.host_sources("processes", host), begin_ns, end_ns):
        chosen = np.isin(rows["pid"], list(pids)) & np.isfinite(rows["cores_used"])
        ticks, first = np.unique(times[chosen], return_index=True)
        if len(ticks) < 2:
            continue
        runnable = np.fmax(rows["cores_used"] + np.nan_to_num(rows["waiting_cores"]), rows["busy_threads"])[chosen]
        highest = max(highest, float(np.add.reduceat(runnable.astype(np.float64), first).max()))
        longest_ns = max(longest_ns, float(np.median(np.diff(ticks))))
    return (highest, longest_ns / 2e9) if longest_ns else (float("nan"), float("nan"))


def read_allocator_windows(source: Source, begin_ns: int, end_ns: int) -> SampleWindows:
    """Read the allocated bytes of a rank."""
    rows = source.between(begin_ns - 1, end_ns)
    return _build_moments(source.unix_times(rows), rows["allocated_bytes"].astype(np.float64))


def _build_moments(times: Ints, values: Floats) -> SampleWindows:
    return SampleWindows(times - _MOMENT_NS, times, values, moments=True)


def _build_utilization(times: Ints, rows: Rows) -> SampleWindows:
    """Keep the readings right after updates: where one of NVML's two utilizations changed, and every 200 ms after that."""
    values, other = rows["utilization_percent"].astype(np.float64), rows["memory_utilization_percent"]
    changed = np.flatnonzero((np.abs(np.diff(values)) > 0) | (np.abs(np.diff(other)) > 0)) + 1
    if not len(changed):
        return _drop_nan(SampleWindows(times - _RENEWED_NS, times, values, _TICK_NS))
    since = times - times[changed[np.maximum(np.searchsorted(changed, np.arange(len(times)), "right") - 1, 0)]]
    distance = since - np.round(since / _RENEWED_NS) * _RENEWED_NS
    new = np.abs(distance) < _TICK_NS / 2
    return _drop_nan(SampleWindows(times[new] - _RENEWED_NS, times[new], values[new], _TICK_NS))


def _build_power(times: Ints, watts: Floats) -> SampleWindows:
    times, watts = times[np.isfinite(watts)], watts[np.isfinite(watts)]
    if len(watts) < 2:
        return NO_WINDOWS
    passed = np.maximum(np.diff(times), 1) / 1e9
    instant = bool((np.abs(np.diff(watts)) / passed > _AVERAGE_CHANGE * watts.max()).any())
    return SampleWindows(times - (_DRAWN_NS if instant else _SECOND_NS), times, watts, _TICK_NS)


def _build_traffic(times: Ints, counter: Ints) -> SampleWindows:
    """Return bytes per second between the readings of a counter that found it raised."""
    known = np.flatnonzero(counter >= 0)
    if len(known) < 2:
        return NO_WINDOWS
    times, counter = times[known], counter[known]
    raised = np.concatenate(([True], np.diff(counter) > 0))
    if len(times[raised]) > 1 and np.median(np.diff(times[raised])) < 1.5 * _TICK_NS:
        raised[:] = True
    times, counter = times[raised], counter[raised]
    passed, moved = np.diff(times), np.diff(counter)
    usable = (passed > 0) & (moved >= 0) & (passed < 2 * _HELD_UP_NS)
    rates = moved[usable] / passed[usable] * 1e9
    return SampleWindows(times[:-1][usable], times[1:][usable], rates)


def _drop_nan(windows: SampleWindows) -> SampleWindows:
    return windows.select(np.isfinite(windows.values))
