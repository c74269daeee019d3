"""One GPU as NVML saw it, matched with the figures of PyTorch's allocators on it.

NVML and the allocators are read at different moments. Figures that need both, such as a process's memory outside PyTorch,
are taken at a moment around which the allocators' figures did not change, so that they are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.processes.ranks_and_hosts import find_last_ticks
from zerotop.recording.keys import GpuKey
from zerotop.recording.moments.at import At
from zerotop.recording.moments.devices import read_devices
from zerotop.recording.reader import Recording, Source
from zerotop.recording.steps.step_memory import measure_held_bytes
from zerotop_probe.recording.tables import FRESH_NS, UNKNOWN

# NVML's readings to search for one around which the allocators did not change: some seconds.
_MOST_READINGS = 16
# Records to look back through for a GPU's last one: the last ticks.
_TAIL = 64
# Allocators are read ten times a second: a figure older than this is outdated.
_OUTDATED_NS = 400_000_000


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """NVML's figures for one GPU. ``None`` is not known."""

    total_bytes: int
    used_bytes: int  # by anyone, the latest
    # By the job's processes, None where NVML does not show them. What the device gained since NVML last listed processes
    # counts as the job's.
    job_bytes: int | None
    others_bytes: int  # by other processes
    driver_bytes: int  # by no process: the driver's own, and memory that NVML does not attribute
    before_bytes: int | None  # in use when the recording began; replaces the two above where job_bytes is None
    # By the job's processes beyond their allocators' figures: at most, where that is not exact.
    outside_bytes: int | None
    is_exact: bool  # the allocators did not change around that reading
    # Bytes of the job's processes that have no allocator here, such as contexts of ranks that train on another GPU, by
    # process id; a part of job_bytes and of outside_bytes.
    by_other_ranks: tuple[tuple[int, int], ...] = ()
    has_given_back: bool = False  # the job uses less than its allocators held at their last, outdated reading
    host_bytes: int | None = None
    """Of unified memory, of which the kernel has the figures above: what the job's processes hold as host memory."""
    outside_least_bytes: int = 0
    """The least of ``outside_bytes`` where that is not exact."""
    outside_after_ns: int | None = None
    """How long after the cursor NVML was read for ``outside_bytes``; None before it."""

    @property
    def is_unified(self) -> bool:
        """Whether GPU and host share one pool."""
        return self.host_bytes is not None


class _Outside(NamedTuple):
    """Bytes of the job's processes beyond their allocators'."""

    bytes: int | None  # at most
    is_exact: bool
    least: int = 0


def read_device_memory(
    at: At, gpu_key: GpuKey, pids: set[int], allocators: Sequence[Source], *, until_ns: int | None = None
) -> DeviceMemory | None:
    """Return a GPU's figures at the cursor; None where NVML was not available.

    Args:
        pids: the job's processes on the host.
        allocators: the allocator tables with this GPU.
        until_ns: how long to look for what is outside of the allocators, where they changed around all readings before.
    """
    host, gpu = gpu_key
    if gpu_key in read_devices(at).unified:
        return _read_unified_memory(at, gpu_key, pids, allocators)
    readings = _find_latest_source(at, "gpus", host)
    now = _find_gpu_row(readings, gpu, at.cursor_ns) if readings is not None else None
    if readings is None or now is None or int(now["used_bytes"]) == UNKNOWN:
        return None
    total, used = int(now["total_bytes"]), int(now["used_bytes"])
    processes = _find_latest_source(at, "gpu_processes", host)
    ticks = _iter_process_ticks(processes, at.cursor_ns, gpu) if processes is not None else iter(())
    latest = next(ticks, None)
    job = _sum_used(latest, pids) if latest is not None else 0
    if allocators and not job:
        before = _read_used_before(at.recording, gpu_key, min(source.created_ns for source in allocators))
        if before is None:
            return DeviceMemory(total, used, None, 0, 0, None, None, False)
        beyond = _iter_use_beyond(readings, gpu, before, at.cursor_ns)
        outside, is_exact, least = _measure_outside(beyond, allocators, at.cursor_ns)
        return DeviceMemory(total, used, None, 0, 0, before, outside, is_exact, outside_least_bytes=least)
    if processes is None or latest is None:
        return DeviceMemory(total, used, 0, 0, used, None, None, True)
    listed_ns = int(latest["time_ns"][0])
    then = _find_gpu_row(readings, gpu, listed_ns + readings.offset_ns)
    used_then = int(then["used_bytes"]) if then is not None else used
    unchanged = _find_unchanged_times(readings, gpu, listed_ns + processes.offset_ns, at.cursor_ns)
    earlier = ((int(tick["time_ns"][0]) + processes.offset_ns, _sum_used(tick, pids)) for tick in chain((latest,), ticks))
    figures = chain(((time_ns, job) for time_ns in unchanged), earlier)
    outside, is_exact, least = _measure_outside(figures, allocators, at.cursor_ns)
    after_ns = None
    if not is_exact and until_ns is not None:
        later = (
            (time_ns, _sum_used(tick, pids)) for time_ns, tick in _iter_later_ticks(processes, at.cursor_ns, until_ns, gpu)
        )
        for time_ns, job_later in later:
            exact = _measure_outside([(time_ns, job_later)], allocators, until_ns)
            if exact.is_exact and exact.bytes is not None and least <= exact.bytes:
                if outside is None or exact.bytes <= outside:  # else it has changed in between
                    outside, is_exact, after_ns = exact.bytes, True, time_ns - at.cursor_ns
                break
    others, job_now = _sum_used(latest, None) - job, job + used - used_then
    has_given_back = _has_given_back(allocators, at.cursor_ns, job_now, int(now["time_ns"]) + readings.offset_ns)
    by_other_ranks = _list_other_ranks(latest, pids, allocators)
    rest = used_then - others - job
    return DeviceMemory(
        *(total, used, job_now, others, rest, None, outside, is_exact, by_other_ranks, has_given_back),
        outside_least_bytes=least,
        outside_after_ns=after_ns,
    )


def _read_unified_memory(at: At, gpu_key: GpuKey, pids: set[int], allocators: Sequence[Source]) -> DeviceMemory | None:
    """Return the host's memory as that of its GPU; None where it was not sampled."""
    host, gpu = gpu_key
    readings = _find_latest_source(at, "hosts", host)
    if readings is None:
        return None
    row = readings.until(at.cursor_ns)[-1]
    total, available = int(row["memory_total_bytes"]), int(row["memory_available_bytes"])
    if total <= 0 or available < 0:
        return None
    listed = _find_latest_source(at, "gpu_processes", host)
    latest = next(_iter_process_ticks(listed, at.cursor_ns, gpu), None) if listed is not None else None
    job = _sum_used(latest, pids) if latest is not None else 0
    others = _sum_used(latest, None) - job if latest is not None else 0
    outside, is_exact = None, True
    if job and listed is not None and latest is not None:
        listed_ns = int(latest["time_ns"][0]) + listed.offset_ns
        outside, is_exact, _ = _measure_outside([(listed_ns, job)], allocators, at.cursor_ns)
    ticks = find_last_ticks(at.host_sources("processes", host), at.cursor_ns)
    held = sum(int(measure_held_bytes(one)) for _, tick in ticks.values() for one in tick if int(one["pid"]) in pids)
    return DeviceMemory(*(total, total - available, job or None, others, 0, None, outside, is_exact), host_bytes=held)


def _list_other_ranks(tick: Any, pids: set[int], allocators: Sequence[Source]) -> tuple[tuple[int, int], ...]:
    """Return the job's processes on a GPU whose allocators are elsewhere; none if no process with an allocator is shown."""
    own = {source.pid for source in allocators}
    sizes = dict(zip(tick["pid"].tolist(), tick["used_bytes"].tolist(), strict=True))
    if not own & sizes.keys():
        return ()
    return tuple(sorted((pid, size) for pid, size in sizes.items() if pid in pids - own and size > 0))


def _has_given_back(allocators: Sequence[Source], cursor_ns: int, job: int, device_read_ns: int) -> bool:
    """Return whether the job uses less than its allocators held at their last reading, as when a rank has ended."""
    last = [source.array[source.count_until(cursor_ns) - 1] for source in allocators]
    if not last or sum(max(0, int(row["reserved_bytes"])) for row in last) <= job:
        return False
    read_ns = (int(row["time_ns"]) + source.offset_ns for row, source in zip(last, allocators, strict=True))
    return min(read_ns) < device_read_ns - _OUTDATED_NS


def _read_used_before(recording: Recording, gpu_key: GpuKey, began_ns: int) -> int | None:
    """Return the bytes in use at the recording's first reading; None if that is not before ``began_ns``."""
    first = next((source for source in recording.host_sources("gpus", gpu_key[0]) if len(source.array)), None)
    first_ns = int(first.array["time_ns"][0]) + first.offset_ns if first is not None else began_ns
    row = _find_gpu_row(first, gpu_key[1], first_ns) if first is not None and first_ns < began_ns else None
    return int(row["used_bytes"]) if row is not None else None


def _iter_use_beyond(readings: Source, gpu: int, before: int, cursor_ns: int) -> Iterator[tuple[int, int]]:
    """Yield (unix time, bytes in use beyond ``before``) of the last readings, latest first."""
    tail = readings.until(cursor_ns)[-_TAIL * _MOST_READINGS :]
    for row in tail[tail["gpu"] == gpu][: -_MOST_READINGS - 1 : -1]:
        yield int(row["time_ns"]) + readings.offset_ns, int(row["used_bytes"]) - before


def _measure_outside(readings: Iterable[tuple[int, int]], allocators: Sequence[Source], cursor_ns: int) -> _Outside:
    """Return the job's bytes beyond its allocators'.

    ``readings``: (unix time, the job's bytes), latest first. Where the allocators' figures change around each of them, each
    gives a range. What is outside rarely changes: of ranges that agree, the least upper end is nearest to it.
    """
    least, most = 0, None
    counts = [source.count_until(cursor_ns) for source in allocators]
    for time_ns, job in readings:
        reserved = [_read_reserved(source, time_ns, count) for source, count in zip(allocators, counts, strict=True)]
        sizes = [size for size, _ in reserved if size is not None]
        held = sum(sizes)
        if len(sizes) < len(reserved) or job < held:
            continue
        growth = [more for _, more in reserved if more is not None]
        if len(growth) == len(reserved) and not any(growth):
            return _Outside(job - held, True)
        is_open = len(growth) < len(reserved)  # what a process holds before its allocator grows is less, too
        if most is not None and is_open:
            continue
        low = 0 if is_open else job - held - sum(growth)
        if most is not None and (low > most or job - held < least):  # it has changed in between
            break
        least, most = max(least, low), job - held if most is None else min(most, job - held)
    return _Outside(most, False, least)


def _iter_later_ticks(source: Source, cursor_ns: int, until_ns: int, gpu: int) -> Iterator[tuple[int, Any]]:
    """Yield the first times after the cursor at which the processes on a GPU were listed, and the processes."""
    rows = source.between(cursor_ns, min(until_ns, cursor_ns + FRESH_NS))
    rows = rows[rows["gpu"] == gpu]
    for time_ns in np.unique(rows["time_ns"])[:_MOST_READINGS].tolist():
        yield time_ns + source.offset_ns, rows[rows["time_ns"] == time_ns]


def _find_unchanged_times(readings: Source, gpu: int, time_ns: int, cursor_ns: int) -> list[int]:
    """Return the times of a device's readings from one on, latest first, while its figure was unchanged.

    The figures of processes also hold for these times: the sampler lists them again only when the device's figure changes.
    """
    since = readings.between(time_ns - 1, cursor_ns)
    rows = since[since["gpu"] == gpu]
    changed = np.flatnonzero(rows["used_bytes"] != rows["used_bytes"][:1])
    same = rows[: changed[0]] if len(changed) else rows
    return [int(own_ns) + readings.offset_ns for own_ns in same["time_ns"][::-1]]


def _read_reserved(source: Source, time_ns: int, count: int) -> tuple[int | None, int | None]:
    """Return the least that an allocator reserved at a moment, and how much more at most; None is not known.

    Both follow from the readings before and after it, of ``count``.
    """
    after = source.count_until(time_ns)
    sizes = source.array["reserved_bytes"][max(0, after - 1) : min(after + 1, count)].tolist()
    return min(sizes, default=None), max(sizes) - min(sizes) if len(sizes) == 2 else None


def _find_latest_source(at: At, table: str, host: str) -> Source | None:
    """Return the table of the host's sampler that wrote last: a sampler may have been restarted."""
    sources = [source for source in at.host_sources(table, host) if source.count_until(at.cursor_ns)]
    return max(sources, key=lambda s: int(s.array["time_ns"][s.count_until(at.cursor_ns) - 1]) + s.offset_ns, default=None)


def _find_gpu_row(readings: Source, gpu: int, time_ns: int) -> Any:
    """Return the GPU's last record up to a moment."""
    tail = readings.until(time_ns)[-_TAIL:]
    indices = np.flatnonzero(tail["gpu"] == gpu)
    return tail[indices[-1]] if len(indices) else None


def _iter_process_ticks(source: Source, cursor_ns: int, gpu: int) -> Iterator[Any]:
    """Yield the processes on a GPU at each of the last ticks, latest first; none if the latest is old."""
    end = source.count_until(cursor_ns)
    times = source.array["time_ns"]
    if not end or int(times[end - 1]) + source.offset_ns < cursor_ns - FRESH_NS:
        return
    for _ in range(_MOST_READINGS):
        if not end:
            return
        begin = int(np.searchsorted(times[:end], times[end - 1], "left"))
        tick = source.array[begin:end]
        rows = tick[tick["gpu"] == gpu]
        if len(rows):
            yield rows
        end = begin


def _sum_used(tick: Any, pids: set[int] | None) -> int:
    """Return the bytes of the processes ``pids``, or of all; unknown figures count as 0."""
    processes = zip(tick["pid"].tolist(), tick["used_bytes"].tolist(), strict=True)
    return sum(max(0, used) for pid, used in processes if pids is None or pid in pids)
