"""What each sensor's samples mean in time: the window that a value is the mean of, or the moment it was read at.

- GPU utilization: NVML renews it every 200 ms and says the share of those 200 ms in which a kernel ran. The sampler looks
  every 100 ms, so that a value that is new at a look was renewed at any moment since the look before: see ``slack_ns``.
- Power: what the device drew when NVML last renewed it, which it does every 100 ms: a reading may be that old. Where it
  changes too little for that it is taken for the driver's one-second average, which is what older GPUs tell: on a GPU that
  draws the same all the time the two are one.
- PCIe: bytes between two looks at the counters, which are 50 to 500 ms apart, less often the less flows.
- Cores: processor time between two samples.
- Allocated memory: exact where a phase begins or ends, and ten times a second in between.
- Resident memory: ten times a second.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from zerotop.session.reader import Session, Source
from zerotop.session.samples import Floats, Ints, Rows, iter_samples

_RENEWED_NS = 200_000_000
_SECOND_NS = 1_000_000_000
_TICK_NS = 100_000_000  # from look to look of the sampler, and between renewals of power
_DRAWN_NS = 20_000_000  # of which a reading of power is the mean, as far as its curves are that sharp
# A moment's reading counts for so long before it: a window needs some length, and this is less than a place of the fold.
_MOMENT_NS = 1_000_000
# An average over a second cannot change faster than by its highest value in a second, but power itself does; with some room.
_AVERAGE_CHANGE = 1.5
# A sampler that was held up says the mean of a long while: of no use for telling places apart.
_HELD_UP_NS = 1_500_000_000


class SampleWindows(NamedTuple):
    """Samples: each value is the mean over its window, in unix nanoseconds."""

    begins_ns: Ints
    ends_ns: Ints
    values: Floats
    slack_ns: int = 0  # by how much all windows may lie earlier than said
    moments: bool = False  # values are readings at ``ends_ns``

    @property
    def length_s(self) -> float:
        """How long most windows are."""
        return float(np.median(self.ends_ns - self.begins_ns)) / 1e9 if len(self.values) else 0.0


NO_WINDOWS = SampleWindows(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))


def merge_windows(parts: Iterable[SampleWindows]) -> SampleWindows:
    """Windows of several tables as one."""
    some = [part for part in parts if len(part.values)]
    if len(some) < 2:
        return some[0] if some else NO_WINDOWS
    begins, ends, values = (np.concatenate(columns) for columns in zip(*(part[:3] for part in some), strict=True))
    return SampleWindows(begins, ends, values, max(part.slack_ns for part in some), some[0].moments)


def read_gpu_windows(session: Session, host: str, index: int, begin_ns: int, end_ns: int) -> dict[str, SampleWindows]:
    """``utilization`` (percent), ``power`` (watts), ``to_host`` and ``to_gpu`` (bytes per second) of a GPU."""
    found: dict[str, list[SampleWindows]] = {"utilization": [], "power": [], "to_host": [], "to_gpu": []}
    for times, rows in iter_samples(session.host_sources("gpus", host), begin_ns - 1, end_ns, "gpu", index):
        found["utilization"].append(_build_utilization(times, rows))
        found["power"].append(_build_power(times, rows["power_w"].astype(np.float64)))
        found["to_host"].append(_build_traffic(times, rows["pcie_tx_bytes"]))
        found["to_gpu"].append(_build_traffic(times, rows["pcie_rx_bytes"]))
    return {name: merge_windows(parts) for name, parts in found.items()}


def read_process_windows(
    session: Session, host: str, pids: Collection[int], begin_ns: int, end_ns: int
) -> dict[str, SampleWindows]:
    """``cores`` and ``resident`` (bytes) of these processes on a host together, where all of them were sampled."""
    found: dict[str, list[SampleWindows]] = {"cores": [], "resident": []}
    for times, rows in iter_samples(session.host_sources("processes", host), begin_ns - 1, end_ns):
        mine = np.isin(rows["pid"], list(pids)) if len(pids) > 1 else rows["pid"] == next(iter(pids), -1)
        times, first, counts = np.unique(times[mine], return_index=True, return_counts=True)
        if not len(times):
            continue
        cores, resident = (
            np.add.reduceat(rows[name][mine].astype(np.float64), first) for name in ("cores_used", "rss_bytes")
        )
        complete = counts == counts.max()  # ticks in which all processes were sampled
        usable = complete[1:] & complete[:-1] & (np.diff(times) < _HELD_UP_NS) & np.isfinite(cores[1:])
        found["cores"].append(SampleWindows(times[:-1][usable], times[1:][usable], cores[1:][usable]))
        found["resident"].append(_build_moments(times[complete], resident[complete]))
    return {name: merge_windows(parts) for name, parts in found.items()}


def read_allocator_windows(source: Source, begin_ns: int, end_ns: int) -> SampleWindows:
    """Bytes that a rank's allocator had given away."""
    rows = source.between(begin_ns - 1, end_ns)
    return _build_moments(source.unix_times(rows), rows["allocated_bytes"].astype(np.float64))


def _build_moments(times: Ints, values: Floats) -> SampleWindows:
    return SampleWindows(times - _MOMENT_NS, times, values, moments=True)


def _build_utilization(times: Ints, rows: Rows) -> SampleWindows:
    """The values at looks that found them renewed: by when one of NVML's two shares has changed, and every 200 ms after."""
    values, other = rows["utilization_percent"].astype(np.float64), rows["memory_utilization_percent"]
    changed = np.flatnonzero((np.abs(np.diff(values)) > 0) | (np.abs(np.diff(other)) > 0)) + 1
    if not len(changed):
        return _drop_nan(SampleWindows(times - _RENEWED_NS, times, values, _TICK_NS))
    since = times - times[changed[np.maximum(np.searchsorted(changed, np.arange(len(times)), "right") - 1, 0)]]
    away = since - np.round(since / _RENEWED_NS) * _RENEWED_NS
    new = np.abs(away) < _TICK_NS / 2
    return _drop_nan(SampleWindows(times[new] - _RENEWED_NS, times[new], values[new], _TICK_NS))


def _build_power(times: Ints, watts: Floats) -> SampleWindows:
    times, watts = times[np.isfinite(watts)], watts[np.isfinite(watts)]
    if len(watts) < 2:
        return NO_WINDOWS
    passed = np.maximum(np.diff(times), 1) / 1e9
    instant = bool((np.abs(np.diff(watts)) / passed > _AVERAGE_CHANGE * watts.max()).any())
    return SampleWindows(times - (_DRAWN_NS if instant else _SECOND_NS), times, watts, _TICK_NS)


def _build_traffic(times: Ints, counter: Ints) -> SampleWindows:
    """Bytes per second between the looks that found more; where looks are rare, what flowed in one of several is spread."""
    known = np.flatnonzero(counter >= 0)
    if len(known) < 2:
        return NO_WINDOWS
    times, counter = times[known], counter[known]
    looked = np.concatenate(([True], np.diff(counter) > 0))
    if len(times[looked]) > 1 and np.median(np.diff(times[looked])) < 1.5 * _TICK_NS:
        looked[:] = True
    times, counter = times[looked], counter[looked]
    passed, more = np.diff(times), np.diff(counter)
    usable = (passed > 0) & (more >= 0) & (passed < 2 * _HELD_UP_NS)
    rates = more[usable] / passed[usable] * 1e9
    return SampleWindows(times[:-1][usable], times[1:][usable], rates)


def _drop_nan(windows: SampleWindows) -> SampleWindows:
    known = np.isfinite(windows.values)
    return windows._replace(begins_ns=windows.begins_ns[known], ends_ns=windows.ends_ns[known], values=windows.values[known])
