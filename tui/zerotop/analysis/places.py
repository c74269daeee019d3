"""Ranks, GPUs and hosts at a cursor, from the samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from zerotop.analysis.peaks import Peaks
from zerotop.analysis.view import Gpu, Host, Rank
from zerotop.session.reader import Event, Session, Source
from zerotop_probe.recording.tables import PHASES, UNKNOWN

# A sample older than this no longer says how things are: its process or its sampler is gone.
FRESH_NS = 3_000_000_000
# How far back an enclosing phase is looked for; phases nest three deep.
_NESTED = 24
# Samples looked back through for the last of a process that is gone: minutes, with a few ranks.
_TAIL = 4096
_RATE_NS = 1_000_000_000
# Counters jump when a GPU is reset; a PCIe link moves no more than this in a second.
_FASTEST_LINK = 1e12


def current_phase(session: Session, host: str, pid: int, cursor_ns: int) -> tuple[str, float, int | None]:
    """Name, seconds so far and step of the innermost phase in progress; an empty name where the probe was not awake."""
    for source in session.sources["begins"]:
        if (source.host, source.pid) == (host, pid):
            return _open_phase(session, source, cursor_ns)
    return "", 0.0, None


def _open_phase(session: Session, begins: Source, cursor_ns: int) -> tuple[str, float, int | None]:
    known = begins.count_known(cursor_ns)
    if not known:
        return "", 0.0, None
    ended = _ended(session, begins, cursor_ns)
    tail = begins.array[max(0, known - _NESTED) : known]
    step = int(tail[-1]["step"])
    latest = int(tail[-1]["time_ns"])
    for begin in reversed(tail):
        key = (int(begin["time_ns"]), int(begin["phase"]))
        if key not in ended:
            return PHASES[key[1]], (cursor_ns - begins.offset_ns - key[0]) / 1e9, step
        latest = max(latest, ended[key])
        if begin["depth"] == 0:
            break
    return "other", (cursor_ns - begins.offset_ns - latest) / 1e9, step


def _ended(session: Session, begins: Source, cursor_ns: int) -> dict[tuple[int, int], int]:
    for source in session.sources["spans"]:
        if (source.host, source.pid, source.rank) == (begins.host, begins.pid, begins.rank):
            known = source.count_known(cursor_ns)
            spans = source.array[max(0, known - 4 * _NESTED) : known]
            return {(int(s["begin_ns"]), int(s["phase"])): int(s["end_ns"]) for s in spans}
    return {}


def ranks(session: Session, cursor_ns: int, peaks: Peaks, *, ended: bool) -> tuple[Rank, ...]:
    """The rank processes last sampled, by rank. After the job's end they are shown as they were, not alive."""
    found: dict[tuple[str, int], Rank] = {}
    for source in session.sources["processes"]:
        highest = peaks.upto(source, "rss_bytes", cursor_ns, by="pid")
        for row in _last_of_each(source, cursor_ns):
            rank = _rank(session, source, row, cursor_ns, highest, ended)
            found[(source.host, rank.rank)] = rank
    known = [rank for rank in found.values() if rank.rank >= 0]
    return tuple(sorted(known or found.values(), key=lambda rank: rank.rank))


def _last_of_each(source: Source, cursor_ns: int) -> list[Any]:
    """The last sample of each rank's process, dead or alive, and of launchers that were just there."""
    known = source.count_known(cursor_ns)
    if not known:
        return []
    tail = source.array[max(0, known - _TAIL) : known]
    tail = tail[(tail["time_ns"] >= tail["time_ns"][-1] - FRESH_NS) | (tail["rank"] >= 0)]
    _, places = np.unique(tail["pid"][::-1], return_index=True)
    return list(tail[len(tail) - 1 - np.sort(places)[::-1]])


def _rank(session: Session, source: Source, row: Any, cursor_ns: int, highest: dict[int, int], ended: bool) -> Rank:
    pid = int(row["pid"])
    fresh = cursor_ns - (int(row["time_ns"]) + source.offset_ns) < FRESH_NS
    phase, phase_s, step = current_phase(session, source.host, pid, cursor_ns)
    rss = int(row["rss_bytes"])
    return Rank(
        rank=int(row["rank"]),
        host=source.host,
        pid=pid,
        alive=fresh and not ended,
        phase="" if ended else phase,
        phase_s=phase_s,
        step=step,
        rss_bytes=rss,
        rss_peak_bytes=max(rss, highest.get(pid, 0)),
        shared_bytes=_or_zero(row["shared_bytes"]),
        pinned_bytes=_or_zero(row["pinned_bytes"]) + _or_zero(row["locked_bytes"]),
        cores_used=float(row["cores_used"]),
        waiting_cores=float(row["waiting_cores"]),
        thread_count=int(row["thread_count"]),
        busy_threads=int(row["busy_threads"]),
        busiest=_busiest(session, source.host, pid, cursor_ns),
    )


def _or_zero(value: Any) -> int:
    return max(0, int(value))


def _busiest(session: Session, host: str, pid: int, cursor_ns: int) -> tuple[tuple[str, float], ...]:
    for source in session.sources["threads"]:
        if source.host == host:
            tick = source.last_tick(cursor_ns, cursor_ns - FRESH_NS)
            mine = tick[tick["pid"] == pid]
            names = [(bytes(t["name"]).decode("utf-8", "replace"), float(t["cores_used"])) for t in mine]
            if names:
                return tuple(sorted(names, key=lambda named: -named[1]))
    return ()


def hosts(session: Session, cursor_ns: int) -> tuple[Host, ...]:
    """Each node as last sampled."""
    found = {}
    for source in session.sources["hosts"]:
        for row in source.last_tick(cursor_ns):
            total, limit = int(row["memory_total_bytes"]), int(row["cgroup_limit_bytes"])
            confined = 0 < limit < total
            used = int(row["cgroup_used_bytes"]) if confined else total - int(row["memory_available_bytes"])
            found[source.host] = Host(
                name=source.host,
                cores=int(row["cores"]),
                cores_used=float(row["cores_used"]),
                memory_limit_bytes=limit if confined else total,
                memory_used_bytes=used,
                swap_used_bytes=_or_zero(row["swap_used_bytes"]),
            )
    return tuple(found.values())


def gpus(
    session: Session, cursor_ns: int, nodes: Iterable[Event], lies_on: dict[int, tuple[str, int]]
) -> tuple[Gpu, ...]:
    """Each GPU as last sampled, with what PyTorch's allocators on it say; ``lies_on`` is from :func:`allocators`."""
    names = {(node.host, gpu["index"]): gpu for node in nodes for gpu in node.facts.get("gpus") or []}
    by_gpu = _samples(session, cursor_ns, lies_on)
    found = {}
    for source in session.sources["gpus"]:
        for row in source.last_tick(cursor_ns):
            key = (source.host, int(row["gpu"]))
            samples = by_gpu.get(key)
            tx, rx = _rates(source, row, cursor_ns)
            found[key] = Gpu(
                host=source.host,
                index=key[1],
                name=str(names.get(key, {}).get("name", "GPU")),
                total_bytes=int(row["total_bytes"]),
                used_bytes=_or_zero(row["used_bytes"]),
                allocated_bytes=_sum(samples, "allocated_bytes"),
                allocated_peak_bytes=_sum(samples, "allocated_peak_bytes"),
                reserved_bytes=_sum(samples, "reserved_bytes"),
                reserved_peak_bytes=_sum(samples, "reserved_peak_bytes"),
                process_bytes=_process_bytes(session, key, cursor_ns),
                utilization_percent=float(row["utilization_percent"]),
                power_w=float(row["power_w"]),
                temperature_c=float(row["temperature_c"]),
                pcie_tx_bytes_per_s=tx,
                pcie_rx_bytes_per_s=rx,
            )
    return tuple(found[key] for key in sorted(found))


def _sum(samples: list[Any] | None, column: str) -> int | None:
    return sum(int(sample[column]) for sample in samples) if samples else None


def allocators(session: Session, nodes: Iterable[Event], engines: Iterable[Event]) -> dict[int, tuple[str, int]]:
    """Place of an allocator's table in the session -> (host, index) of the GPU that its last record tells of.

    Devices are the same when their UUIDs are; without them a rank's ordinal is taken for the index.
    """
    index_of = {
        (node.host, _bare(gpu.get("uuid"))): int(gpu["index"]) for node in nodes for gpu in node.facts.get("gpus") or []
    }
    devices = {
        (engine.host, engine.pid, device.get("ordinal")): _bare(device.get("uuid"))
        for engine in engines
        for device in engine.facts.get("devices") or []
    }
    found: dict[int, tuple[str, int]] = {}
    for place, source in enumerate(session.sources["allocator"]):
        if len(source.array):
            ordinal = int(source.array[-1]["device"])
            uuid = devices.get((source.host, source.pid, ordinal))
            found[place] = (source.host, index_of.get((source.host, uuid or ""), ordinal))
    return found


def _samples(session: Session, cursor_ns: int, lies_on: dict[int, tuple[str, int]]) -> dict[tuple[str, int], list[Any]]:
    """The last allocator sample of every rank, by the GPU it lies on."""
    found: dict[tuple[str, int], list[Any]] = {}
    for place, key in lies_on.items():
        source = session.sources["allocator"][place]
        known = source.count_known(cursor_ns)
        if known:
            found.setdefault(key, []).append(source.array[known - 1])
    return found


def _bare(uuid: Any) -> str:
    """NVML writes ``GPU-1a2b...``, PyTorch only the rest."""
    return str(uuid or "").removeprefix("GPU-").lower()


def _process_bytes(session: Session, key: tuple[str, int], cursor_ns: int) -> int | None:
    pids = {s.pid for s in session.sources["begins"] if s.host == key[0]}
    for source in session.sources["gpu_processes"]:
        if source.host == key[0]:
            tick = source.last_tick(cursor_ns, cursor_ns - FRESH_NS)
            mine = [int(r["used_bytes"]) for r in tick if int(r["gpu"]) == key[1] and int(r["pid"]) in pids]
            known = [used for used in mine if used != UNKNOWN]
            if known:
                return sum(known)
    return None


def _rates(source: Source, row: Any, cursor_ns: int) -> tuple[float, float]:
    """PCIe bytes per second each way over the last second; NaN where not measured."""
    before = source.last_tick(int(row["time_ns"]) + source.offset_ns - _RATE_NS, cursor_ns - 4 * _RATE_NS)
    earlier = before[before["gpu"] == row["gpu"]]
    if not len(earlier):
        return float("nan"), float("nan")
    seconds = (int(row["time_ns"]) - int(earlier[0]["time_ns"])) / 1e9
    rates = []
    for column in ("pcie_tx_bytes", "pcie_rx_bytes"):
        now, then = int(row[column]), int(earlier[0][column])
        rate = (now - then) / seconds if seconds > 0 and now >= then >= 0 else float("nan")
        rates.append(rate if rate < _FASTEST_LINK else float("nan"))
    return rates[0], rates[1]
