"""Ranks and hosts at a cursor, from the samples, and on which GPUs the ranks lie."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.keys import GpuKey, ProcessKey
from zerotop.analysis.live_view import Host, Rank
from zerotop.analysis.processes import phases
from zerotop.analysis.processes.devices import Devices
from zerotop.analysis.processes.host_memory import read_host_memory
from zerotop.analysis.processes.process_exits import ProcessExits
from zerotop.analysis.processes.running_max import Peaks
from zerotop.session.reader import Event, Session, Source, run_to_end

# A sample older than this no longer says how things are: its process or its sampler is gone.
FRESH_NS = 3_000_000_000
# Samples looked back through for the last of a process that is gone: minutes, with a few ranks.
_TAIL_ROWS = 4096
_NEAR_ROWS = 256  # among which the last tick of a node usually is
# Work done in one go: nodes, and ranks. With very many of them keys have their turn in between.
NODES_AT_ONCE, RANKS_AT_ONCE = 4, 32
Values = dict[str, Any]


def find_last_ticks(sources: Iterable[Source], cursor_ns: int, oldest_ns: int = 0) -> dict[str, tuple[Source, NDArray[Any]]]:
    """By host the last tick up to the cursor, of the sampler that ticked last; none if older than ``oldest_ns``."""
    found: dict[str, tuple[int, Source, NDArray[Any]]] = {}
    for source in sources:
        tick = source.read_last_tick(cursor_ns, oldest_ns)
        time_ns = int(tick["time_ns"][-1]) + source.offset_ns if len(tick) else 0
        if time_ns > found.get(source.host, (0,))[0]:
            found[source.host] = time_ns, source, tick
    return {host: (source, tick) for host, (_, source, tick) in found.items()}


class Sample(NamedTuple):
    """A record of a process and when in unix time it was taken."""

    time_ns: int
    host: str
    row: Values

    @property
    def process_key(self) -> ProcessKey:
        """Whose it is."""
        return self.host, self.row["pid"]


def unpack_records(records: NDArray[Any]) -> list[Values]:
    """Each record's fields by name, as plain values: reading many of them one by one from an array takes longer."""
    names = records.dtype.names or ()
    return [dict(zip(names, values, strict=True)) for values in records.tolist()]


def read_ranks(
    session: Session, cursor_ns: int, peaks: Peaks, exits: ProcessExits, *, ended: bool
) -> Generator[None, None, tuple[Rank, ...]]:
    """In pieces the rank processes last sampled, by rank. After the job's end they are shown as they were, not alive.

    Of one whose probe was taken out no phase is told.
    """
    samples: list[Sample] = []
    highest: dict[ProcessKey, int] = {}
    for number, source in enumerate(session.sources["processes"], 1):
        samples += _read_last_samples(source, cursor_ns)
        _raise_peaks(highest, source, cursor_ns, peaks)
        if not number % NODES_AT_ONCE:
            yield
    busiest = yield from _read_busiest(session, cursor_ns)
    found: dict[tuple[str, int], Rank] = {}
    # Of several processes of a rank the last is shown: the job was started again.
    for number, sample in enumerate(sorted(samples, key=lambda sample: sample.time_ns), 1):
        if not number % RANKS_AT_ONCE:
            yield
        begins, spans = (session.find_source(table, *sample.process_key, cursor_ns) for table in ("begins", "spans"))
        phase = phases.find_current(begins, spans, cursor_ns) if begins is not None else ("", 0.0, None)
        alive = not ended and cursor_ns - sample.time_ns < FRESH_NS
        over_ns = exits.reported_until(begins) if begins is not None else None
        silent = ended or (over_ns is not None and over_ns <= cursor_ns)
        rank = _build_rank(sample, alive, ("", *phase[1:]) if silent else phase, highest, busiest)
        found[sample.host, rank.rank] = rank
    known = [rank for rank in found.values() if rank.rank >= 0]
    return tuple(sorted(known or found.values(), key=lambda rank: rank.rank))


def _read_last_samples(source: Source, cursor_ns: int) -> list[Sample]:
    """The last sample of each rank's process, dead or alive, and of launchers that were just there."""
    tail = source.until(cursor_ns)[-_TAIL_ROWS:]
    if not len(tail):
        return []
    rows = _find_full_tick(tail)
    if rows is None:
        rows = _find_last_rows(tail)
    return [Sample(row["time_ns"] + source.offset_ns, source.host, row) for row in unpack_records(rows)]


def _find_full_tick(tail: NDArray[Any]) -> NDArray[Any] | None:
    """The last tick, if all processes are in it, once each."""
    near = tail[-_NEAR_ROWS:]
    tick = near[near["time_ns"] == near["time_ns"][-1]]
    pids = tick["pid"].tolist()
    if len(tick) == len(near) < len(tail) or len(set(pids)) < len(pids):
        return None
    return tick if np.isin(tail["pid"], pids).all() else None


def _find_last_rows(tail: NDArray[Any]) -> NDArray[Any]:
    tail = tail[(tail["time_ns"] >= tail["time_ns"][-1] - FRESH_NS) | (tail["rank"] >= 0)]
    _, places = np.unique(tail["pid"][::-1], return_index=True)
    rows: NDArray[Any] = tail[len(tail) - 1 - np.sort(places)[::-1]]
    return rows


def _raise_peaks(highest: dict[ProcessKey, int], source: Source, cursor_ns: int, peaks: Peaks) -> None:
    """Takes in the highest resident memory of each process that one sampler saw."""
    for pid, rss_bytes in peaks.peaks_until(source, "rss_bytes", cursor_ns, by="pid").items():
        process = source.host, pid
        highest[process] = max(rss_bytes, highest.get(process, 0))


def _read_busiest(session: Session, cursor_ns: int) -> Generator[None, None, dict[ProcessKey, list[tuple[str, float]]]]:
    """Names and cores of each process's busiest threads, busiest first."""
    found: dict[ProcessKey, list[tuple[str, float]]] = {}
    ticks = find_last_ticks(session.sources["threads"], cursor_ns, cursor_ns - FRESH_NS)
    for number, (host, (source, tick)) in enumerate(ticks.items(), 1):
        if not number % NODES_AT_ONCE:
            yield
        for pid, busiest in _load_tick(source, int(tick["time_ns"][-1]), len(tick)).items():
            found[host, pid] = busiest
    return found


_LAST_TICKS: WeakKeyDictionary[Source, tuple[tuple[int, int], dict[int, list[tuple[str, float]]]]] = WeakKeyDictionary()


def _load_tick(source: Source, time_ns: int, count: int) -> dict[int, list[tuple[str, float]]]:
    """The same of one tick of one sampler. It is seen in several frames, and read in the first."""
    known = _LAST_TICKS.get(source)
    if known is None or known[0] != (time_ns, count):
        known = _LAST_TICKS[source] = (time_ns, count), _read_tick(source, time_ns, count)
    return known[1]


def _read_tick(source: Source, time_ns: int, count: int) -> dict[int, list[tuple[str, float]]]:
    tick = source.read_last_tick(time_ns + source.offset_ns)[:count]
    ordered = tick[np.argsort(-tick["cores_used"], kind="stable")]
    columns = (ordered[column].tolist() for column in ("pid", "name", "cores_used"))
    found: dict[int, list[tuple[str, float]]] = {}
    for pid, name, used in zip(*columns, strict=True):
        found.setdefault(pid, []).append((name.decode("utf-8", "replace"), used))
    return found


def _build_rank(
    sample: Sample,
    alive: bool,
    phase: tuple[str, float, int | None],
    highest: dict[ProcessKey, int],
    busiest: dict[ProcessKey, list[tuple[str, float]]],
) -> Rank:
    row = sample.row
    return Rank(
        rank=int(row["rank"]),
        host=sample.host,
        pid=int(row["pid"]),
        alive=alive,
        phase=phase[0],
        phase_s=phase[1],
        step=phase[2],
        rss_bytes=int(row["rss_bytes"]),
        rss_peak_bytes=highest[sample.process_key],
        shared_bytes=_clip_unknown(row["shared_bytes"]),
        pinned_bytes=_clip_unknown(row["pinned_bytes"]) + _clip_unknown(row["locked_bytes"]),
        cores_used=float(row["cores_used"]),
        waiting_cores=float(row["waiting_cores"]),
        thread_count=int(row["thread_count"]),
        busy_threads=int(row["busy_threads"]),
        busiest=tuple(busiest.get(sample.process_key, ())),
    )


def _clip_unknown(value: Any) -> int:
    return max(0, int(value))


def read_hosts(session: Session, cursor_ns: int) -> tuple[Host, ...]:
    """Each node as last sampled."""
    ticks = find_last_ticks(session.sources["hosts"], cursor_ns)
    return tuple(_build_host(name, tick[-1]) for name, (_, tick) in ticks.items())


def _build_host(name: str, row: Any) -> Host:
    memory = read_host_memory(row, int(row["time_ns"]))
    return Host(
        name=name,
        cores=int(row["cores"]),
        cores_used=float(row["cores_used"]),
        memory_limit_bytes=memory.limit_bytes,
        memory_used_bytes=memory.used_bytes,
        swap_used_bytes=_clip_unknown(row["swap_used_bytes"]),
    )


def find_gpu_by_allocator(session: Session, nodes: Iterable[Event], engines: Iterable[Event]) -> dict[int, GpuKey]:
    """Place of an allocator's table in the session -> (host, index) of the GPU that its last record tells of."""
    return run_to_end(locate_allocators(session, nodes, engines))


def locate_allocators(
    session: Session, nodes: Iterable[Event], engines: Iterable[Event]
) -> Generator[None, None, dict[int, GpuKey]]:
    """The same in pieces."""
    devices = Devices(nodes, engines)
    found: dict[int, GpuKey] = {}
    for place, source in enumerate(session.sources["allocator"]):
        if not place % RANKS_AT_ONCE:
            yield
        if len(source.array):
            found[place] = devices.find_gpu(source.host, source.pid, int(source.array["device"][-1]))
    return found


def locate_engines(nodes: Iterable[Event], engines: Iterable[Event]) -> list[tuple[ProcessKey, GpuKey]]:
    """The process of each of these engines with the (host, index) of its GPUs."""
    engines = list(engines)
    devices = Devices(nodes, engines)
    return [
        ((engine.host, engine.pid), devices.find_gpu(engine.host, engine.pid, int(device.get("ordinal") or 0)))
        for engine in engines
        for device in engine.facts.get("devices") or []
    ]
