"""Ranks and hosts at a cursor, from samples, and the GPUs of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.live_view import Activity, Host, LateActivity, Rank
from zerotop.analysis.processes import phases
from zerotop.analysis.processes.recent_means import compute_process_means, find_window
from zerotop.analysis.processes.running_max import find_peaks
from zerotop.analysis.processes.thinned import is_thinned_at
from zerotop.analysis.processes.thread_kinds import read_thread_kinds
from zerotop.recording.keys import ProcessKey
from zerotop.recording.moments.at import At
from zerotop.recording.moments.host_memory import read_host_memory
from zerotop.recording.moments.moment import keep
from zerotop.recording.moments.process_exits import read_exits
from zerotop.recording.reader import Source
from zerotop_probe.recording.tables import FRESH_NS

# Samples to search for the last one of a process that is gone: minutes, with a few ranks.
_TAIL_ROWS = 4096
_NEAR_ROWS = 256  # to search for the last tick of a node
Values = dict[str, Any]


def find_last_ticks(sources: Iterable[Source], cursor_ns: int, oldest_ns: int = 0) -> dict[str, tuple[Source, NDArray[Any]]]:
    """Return by host the last tick of any sampler up to the cursor; none if older than ``oldest_ns``."""
    latest: dict[str, tuple[int, Source, NDArray[Any]]] = {}
    for source in sources:
        tick = source.read_last_tick(cursor_ns, oldest_ns)
        time_ns = int(tick["time_ns"][-1]) + source.offset_ns if len(tick) else 0
        if time_ns > latest.get(source.host, (0,))[0]:
            latest[source.host] = time_ns, source, tick
    return {host: (source, tick) for host, (_, source, tick) in latest.items()}


class Sample(NamedTuple):
    """A record of a process."""

    time_ns: int  # unix time
    host: str
    row: Values
    period_ns: int  # of coarse samples, else 0

    @property
    def process_key(self) -> ProcessKey:
        return self.host, self.row["pid"]


def unpack_records(records: NDArray[Any]) -> list[Values]:
    """Return each record as plain values by name: faster than reading many fields from the array."""
    names = records.dtype.names or ()
    return [dict(zip(names, values, strict=True)) for values in records.tolist()]


def read_ranks(at: At, *, ended: bool) -> tuple[Rank, ...]:
    """Return the rank processes last sampled, by rank; after the job's end their last state, not alive.

    Processes from which the probe was removed have no phase.
    """
    samples: list[Sample] = []
    highest: dict[ProcessKey, int] = {}
    means: dict[ProcessKey, tuple[float, float]] = {}
    for source in at.sources["processes"]:
        samples += _read_last_samples(source, at.cursor_ns)
        recent = compute_process_means(source, find_window(at, source.host))
        means |= {(source.host, pid): values for pid, values in recent.items()}
        _raise_peaks(highest, source, at.cursor_ns)
    # After a restart the last process of a rank is shown.
    latest = {(one.host, int(one.row["rank"])): one for one in sorted(samples, key=lambda sample: sample.time_ns)}
    known = [sample for (_, rank), sample in latest.items() if rank >= 0]
    ranks = [_build_rank(at, sample, ended, highest, means) for sample in known or latest.values()]
    return tuple(sorted(ranks, key=lambda rank: rank.rank))


def _read_last_samples(source: Source, cursor_ns: int) -> list[Sample]:
    """Return the last sample of each rank process, dead or alive, and of launchers sampled recently."""
    count = source.count_until(cursor_ns)
    tail = source.array[max(0, count - _TAIL_ROWS) : count]
    if not len(tail):
        return []
    rows = _find_full_tick(tail, _SeenProcesses.read(source, count))
    if rows is None:
        rows = _find_last_rows(tail)
    times = (rows["time_ns"] + source.offset_ns).tolist()
    rows_and_times = zip(times, unpack_records(rows), strict=True)
    return [Sample(time_ns, source.host, row, source.period_ns) for time_ns, row in rows_and_times]


class _SeenProcesses:
    """The processes that a sampler has seen so far."""

    def __init__(self) -> None:
        self.count = 0  # records read
        self.pids: set[int] = set()

    @classmethod
    def read(cls, source: Source, count: int) -> set[int]:
        """Return the pids in the first ``count`` records, and perhaps those in later ones."""
        seen = keep(source, cls)
        if count > seen.count:
            seen.pids.update(np.unique(source.array["pid"][seen.count : count]).tolist())
            seen.count = count
        return seen.pids


def _find_full_tick(tail: NDArray[Any], seen: set[int]) -> NDArray[Any] | None:
    """Return the last tick if it has all processes, once each; ``seen``: those in the tail, and perhaps others."""
    near = tail[-_NEAR_ROWS:]
    tick = near[near["time_ns"] == near["time_ns"][-1]]
    pids = tick["pid"].tolist()
    if len(tick) == len(near) < len(tail) or len(set(pids)) < len(pids):
        return None
    return tick if seen <= set(pids) or np.isin(tail["pid"], pids).all() else None


def _find_last_rows(tail: NDArray[Any]) -> NDArray[Any]:
    tail = tail[(tail["time_ns"] >= tail["time_ns"][-1] - FRESH_NS) | (tail["rank"] >= 0)]
    _, indices = np.unique(tail["pid"][::-1], return_index=True)
    rows: NDArray[Any] = tail[len(tail) - 1 - np.sort(indices)[::-1]]
    return rows


def _raise_peaks(highest: dict[ProcessKey, int], source: Source, cursor_ns: int) -> None:
    """Raise ``highest`` to the highest resident memory of each process in one table."""
    for pid, (rss_bytes,) in find_peaks(source, ("rss_bytes",), cursor_ns, by="pid").items():
        process = source.host, pid
        highest[process] = max(rss_bytes, highest.get(process, 0))


def _read_activity(at: At, process: ProcessKey, begins: Source | None, spans: Source | None, ended: bool) -> Activity:
    phase, phase_s = phases.find_current(begins, spans, at.cursor_ns)[:2] if begins is not None else ("", 0.0)
    if ended or (begins is not None and read_exits(at).reported_until(begins) is not None):
        phase = ""
    return Activity(phase, phase_s, _read_busiest(at, *process))


def _read_busiest(at: At, host: str, pid: int) -> tuple[tuple[str, float], ...]:
    """Return (what it is, cores) of a process's busiest threads, busiest first."""
    ticks = find_last_ticks(at.host_sources("threads", host), at.cursor_ns, at.cursor_ns - FRESH_NS)
    for source, tick in ticks.values():
        recent = source.between(*find_window(at, host))
        threads = _load_threads(source, recent if len(recent) else tick).get(pid, [])
        kinds = read_thread_kinds(at, host, pid).name_threads({tid: name for tid, name, _ in threads})
        return tuple((kinds[tid], used) for tid, _, used in threads)
    return ()


def _load_threads(source: Source, rows: NDArray[Any]) -> dict[int, list[tuple[int, str, float]]]:
    """Return the busiest threads of these ticks by process, cached: several frames show the same ticks."""
    span = int(rows["time_ns"][0]), int(rows["time_ns"][-1]), len(rows)
    known, threads = source.kept.get(_load_threads, (None, {}))
    if known != span:
        known, threads = source.kept[_load_threads] = span, _average_threads(rows)
    found: dict[int, list[tuple[int, str, float]]] = threads
    return found


def _average_threads(rows: NDArray[Any]) -> dict[int, list[tuple[int, str, float]]]:
    """Return (id, name, cores) of each process's threads, busiest first: the mean of all ticks, 0 where one is not in it."""
    _, last, index = np.unique(rows[["pid", "tid"]][::-1], return_index=True, return_inverse=True)
    used = np.bincount(index, np.nan_to_num(rows["cores_used"][::-1])) / len(np.unique(rows["time_ns"]))
    order = np.argsort(-used, kind="stable")
    ordered = rows[::-1][last[order]]
    columns = (ordered["pid"].tolist(), ordered["tid"].tolist(), ordered["name"].tolist(), used[order].tolist())
    threads: dict[int, list[tuple[int, str, float]]] = {}
    for pid, tid, name, cores in zip(*columns, strict=True):
        threads.setdefault(pid, []).append((tid, name.decode("utf-8", "replace"), cores))
    return threads


def _build_rank(
    at: At,
    sample: Sample,
    ended: bool,
    highest: dict[ProcessKey, int],
    means: dict[ProcessKey, tuple[float, float]],
) -> Rank:
    row = sample.row
    begins, spans = (at.recording.find_source(table, *sample.process_key, at.cursor_ns) for table in ("begins", "spans"))
    if begins is not None and is_thinned_at(at, begins):
        begins = spans = None
    cores_used, waiting_cores = means.get(sample.process_key, (float(row["cores_used"]), float(row["waiting_cores"])))
    return Rank(
        rank=int(row["rank"]),
        host=sample.host,
        pid=int(row["pid"]),
        alive=not ended and at.cursor_ns - sample.time_ns < FRESH_NS + sample.period_ns,
        activity=LateActivity(partial(_read_activity, at, sample.process_key, begins, spans, ended)),
        step=phases.find_step(begins, spans, at.cursor_ns) if begins is not None else None,
        rss_bytes=int(row["rss_bytes"]),
        rss_peak_bytes=highest[sample.process_key],
        shared_bytes=_clip_unknown(row["shared_bytes"]),
        pinned_bytes=_clip_unknown(row["pinned_bytes"]) + _clip_unknown(row["locked_bytes"]),
        cores_used=cores_used,
        waiting_cores=waiting_cores,
        thread_count=int(row["thread_count"]),
    )


def _clip_unknown(value: Any) -> int:
    return max(0, int(value))


def read_hosts(at: At) -> tuple[Host, ...]:
    """Return each node as last sampled, with the cores used on average over the window that ranks have, too."""
    ticks = find_last_ticks(at.sources["hosts"], at.cursor_ns)
    return tuple(
        _build_host(name, tick[-1], source.between(*find_window(at, name))) for name, (source, tick) in ticks.items()
    )


def _build_host(name: str, row: Any, recent: NDArray[Any]) -> Host:
    memory = read_host_memory(row, int(row["time_ns"]))
    return Host(
        name=name,
        cores=int(row["cores"]),
        cores_used=float(recent["cores_used"].mean() if len(recent) else row["cores_used"]),
        memory_limit_bytes=memory.limit_bytes,
        memory_used_bytes=memory.used_bytes,
        swap_used_bytes=_clip_unknown(row["swap_used_bytes"]),
    )
