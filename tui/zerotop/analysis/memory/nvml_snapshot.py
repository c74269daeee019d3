"""One GPU as NVML saw it, fitted to what PyTorch's allocators on it said at the same moments.

NVML looks at its own pace, and allocators are read at theirs. What needs both, as what a process holds outside PyTorch,
is taken from a moment around which the allocators held still, so that it is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from zerotop.analysis.keys import GpuKey
from zerotop.analysis.processes.ranks_and_hosts import FRESH_NS
from zerotop.session.reader import Session, Source
from zerotop_probe.recording.tables import UNKNOWN

# NVML's looks at processes that are searched for one around which the allocators held still: some seconds.
_MOST_READINGS = 16
# An allocator is read ten times a second: one that was not for so long may hold anything by now.
_OUTDATED_NS = 400_000_000


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What NVML said of one GPU. ``None`` is not known."""

    total_bytes: int
    used_bytes: int  # by anyone, the latest
    # By the job's processes, None where NVML does not show them. What the whole device has gained since NVML was last asked
    # for processes counts as the job's.
    job_bytes: int | None
    others_bytes: int  # by processes that are not the job's
    driver_bytes: int  # in use but by no process: the driver's own, and what NVML does not show
    before_bytes: int | None  # in use when the recording began, which stands in for the two where job_bytes is None
    outside_bytes: int | None  # by the job's processes beyond what their allocators held then
    is_exact: bool  # the allocators held still around that look
    has_given_back: bool = False  # the job holds less than its allocators did, which were last read some time before


def read_device_memory(
    session: Session, gpu_key: GpuKey, cursor_ns: int, pids: set[int], allocators: Sequence[Source]
) -> DeviceMemory | None:
    """What was known at the cursor of GPU ``key`` (host, index); None where NVML was not to be had.

    ``pids``: the job's processes on the host; ``allocators``: the tables of those with this GPU.
    """
    rows = _find_latest_source(session.sources["gpus"], gpu_key[0], cursor_ns)
    now = _find_gpu_row(rows, gpu_key[1], rows.count_until(cursor_ns)) if rows is not None else None
    if rows is None or now is None or int(now["used_bytes"]) == UNKNOWN:
        return None
    total, used = int(now["total_bytes"]), int(now["used_bytes"])
    held = _find_latest_source(session.sources["gpu_processes"], gpu_key[0], cursor_ns)
    ticks = _iter_process_ticks(held, cursor_ns, gpu_key[1]) if held is not None else iter(())
    latest = next(ticks, None)
    job = _sum_used(latest, pids) if latest is not None else 0
    if allocators and not job:
        return _measure_without_processes(session, gpu_key, cursor_ns, allocators, (total, used))
    if held is None or latest is None:
        return DeviceMemory(total, used, 0, 0, used, None, None, True)
    others = _sum_used(latest, None) - job
    at = _find_gpu_row(rows, gpu_key[1], _count_by_own_clock(rows, int(latest["time_ns"][0])))
    used_then = int(at["used_bytes"]) if at is not None else used
    earlier = ((int(tick["time_ns"][0]) + held.offset_ns, _sum_used(tick, pids)) for tick in chain((latest,), ticks))
    since = _find_unchanged_times(rows, gpu_key[1], int(latest["time_ns"][0]) + held.offset_ns, cursor_ns)
    outside, settled = _measure_outside(chain(((time_ns, job) for time_ns in since), earlier), allocators, cursor_ns)
    mine, driver = job + used - used_then, used_then - others - job
    given_back = _has_given_back(allocators, cursor_ns, mine, int(now["time_ns"]) + rows.offset_ns)
    return DeviceMemory(total, used, mine, others, driver, None, outside, settled, given_back)


def _has_given_back(allocators: Sequence[Source], cursor_ns: int, job: int, device_read_ns: int) -> bool:
    """Whether the job holds less than its allocators when they were last read: as when a rank has ended."""
    last = [source.array[source.count_until(cursor_ns) - 1] for source in allocators]
    if not last or sum(max(0, int(row["reserved_bytes"])) for row in last) <= job:
        return False
    read_ns = (int(row["time_ns"]) + source.offset_ns for row, source in zip(last, allocators, strict=True))
    return min(read_ns) < device_read_ns - _OUTDATED_NS


def _measure_without_processes(
    session: Session, gpu_key: GpuKey, cursor_ns: int, allocators: Sequence[Source], device: tuple[int, int]
) -> DeviceMemory:
    """NVML shows no process of the job, as in a container: device memory beyond what was in use before is the job's."""
    total, used = device
    first = next((s for s in session.sources["gpus"] if s.host == gpu_key[0] and len(s.array)), None)
    began_ns = min(source.created_ns for source in allocators)
    before = None
    if first is not None and first.array["time_ns"][0] + first.offset_ns < began_ns:
        row = _find_gpu_row(first, gpu_key[1], _count_by_own_clock(first, int(first.array["time_ns"][0])))
        before = int(row["used_bytes"]) if row is not None else None
    if before is None:
        return DeviceMemory(total, used, None, 0, 0, None, None, False)
    rows = _find_latest_source(session.sources["gpus"], gpu_key[0], cursor_ns)
    assert rows is not None
    tail = rows.until(cursor_ns)[-64 * _MOST_READINGS :]
    mine = tail[tail["gpu"] == gpu_key[1]][: -_MOST_READINGS - 1 : -1]
    looks = [(int(row["time_ns"]) + rows.offset_ns, int(row["used_bytes"]) - before) for row in mine]
    outside, settled = _measure_outside(looks, allocators, cursor_ns)
    return DeviceMemory(total, used, None, 0, 0, before, outside, settled)


def _measure_outside(
    readings: Iterable[tuple[int, int]], allocators: Sequence[Source], cursor_ns: int
) -> tuple[int | None, bool]:
    """The job's bytes beyond its allocators', and whether it is exact. ``looks``: (unix time, job's bytes), latest first."""
    roughly = None
    for time_ns, job in readings:
        held = [_read_reserved(source, time_ns, cursor_ns) for source in allocators]
        known = [reserved for reserved, _ in held if reserved is not None]
        if len(known) == len(held) and job >= sum(known):
            if all(still for _, still in held):
                return job - sum(known), True
            roughly = job - sum(known) if roughly is None else roughly
    return roughly, False


def _find_unchanged_times(rows: Source, gpu: int, time_ns: int, cursor_ns: int) -> list[int]:
    """Times of NVML's readings of a device from one on, latest first, for as long as it said the same.

    What processes held then is what they hold now: the sampler asks for them anew only when the device's figure changes.
    """
    since = rows.between(time_ns - 1, cursor_ns)
    mine = since[since["gpu"] == gpu]
    changed = np.flatnonzero(mine["used_bytes"] != mine["used_bytes"][:1])
    same = mine[: changed[0]] if len(changed) else mine
    return [int(at) + rows.offset_ns for at in same["time_ns"][::-1]]


def _read_reserved(source: Source, time_ns: int, cursor_ns: int) -> tuple[int | None, bool]:
    """What an allocator held at a moment, and whether the readings before and after agree."""
    after, known = source.count_until(time_ns), source.count_until(cursor_ns)
    held = source.array["reserved_bytes"][max(0, after - 1) : min(after + 1, known)]
    if not len(held):
        return None, False
    return int(held[0]), len(held) == 2 and held[0] == held[1]


def _find_latest_source(sources: list[Source], host: str, cursor_ns: int) -> Source | None:
    """The table of the host's sampler that wrote last: a sampler that died may have been started again."""
    known = [source for source in sources if source.host == host and source.count_until(cursor_ns)]
    return max(known, key=lambda s: int(s.array["time_ns"][s.count_until(cursor_ns) - 1]) + s.offset_ns, default=None)


def _count_by_own_clock(source: Source, time_ns: int) -> int:
    """How many records are not later than a moment on the writer's own clock."""
    return source.count_until(time_ns + source.offset_ns)


def _find_gpu_row(source: Source, gpu: int, end: int) -> Any:
    """The GPU's last row before the place ``end``, of the last ticks."""
    tail = source.array[max(0, end - 64) : end]
    mine = np.flatnonzero(tail["gpu"] == gpu)
    return tail[mine[-1]] if len(mine) else None


def _iter_process_ticks(source: Source, cursor_ns: int, gpu: int) -> Iterator[Any]:
    """The processes on a GPU at each of the last looks, latest first; nothing if the latest is long ago."""
    end = source.count_until(cursor_ns)
    times = source.array["time_ns"]
    if not end or int(times[end - 1]) + source.offset_ns < cursor_ns - FRESH_NS:
        return
    for _ in range(_MOST_READINGS):
        if not end:
            return
        begin = int(np.searchsorted(times[:end], times[end - 1], "left"))
        tick = source.array[begin:end]
        mine = tick[tick["gpu"] == gpu]
        if len(mine):
            yield mine
        end = begin


def _sum_used(tick: Any, pids: set[int] | None) -> int:
    """What processes hold, those of ``pids`` or all; one that NVML does not tell counts nothing."""
    mine = tick if pids is None else tick[np.isin(tick["pid"], list(pids))]
    return int(np.maximum(mine["used_bytes"], 0).sum())
