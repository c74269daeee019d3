"""GPUs at a cursor, from the samples."""

from __future__ import annotations

from collections.abc import Generator, Iterable

from zerotop.analysis.keys import GpuKey
from zerotop.analysis.live_view import Gpu
from zerotop.analysis.processes.process_exits import ProcessExits
from zerotop.analysis.processes.ranks_and_hosts import (
    FRESH_NS,
    NODES_AT_ONCE,
    RANKS_AT_ONCE,
    Values,
    find_last_ticks,
    unpack_records,
)
from zerotop.analysis.processes.running_max import Peaks
from zerotop.session.reader import Event, Session
from zerotop_probe.recording.tables import UNKNOWN

_RATE_NS = 1_000_000_000
# Counters jump when a GPU is reset; a PCIe link moves no more than this in a second.
_FASTEST_LINK = 1e12


def read_gpus(
    session: Session,
    cursor_ns: int,
    nodes: Iterable[Event],
    gpu_by_allocator: dict[int, GpuKey],
    peaks: Peaks,
    exits: ProcessExits,
) -> Generator[None, None, tuple[Gpu, ...]]:
    """In pieces each GPU as last sampled, with what PyTorch's allocators on it say.

    ``lies_on`` is from :func:`places.allocators`.
    """
    held = yield from _sum_allocators(session, cursor_ns, gpu_by_allocator, peaks, exits)
    yield
    used_by_job = yield from _sum_job_bytes(session, cursor_ns)
    yield
    names = {(node.host, gpu["index"]): str(gpu["name"]) for node in nodes for gpu in node.facts.get("gpus") or []}
    found = {}
    for number, (host, (source, tick)) in enumerate(find_last_ticks(session.sources["gpus"], cursor_ns).items(), 1):
        if not number % NODES_AT_ONCE:
            yield
        time_ns = int(tick["time_ns"][-1]) + source.offset_ns
        before = {
            row["gpu"]: row
            for row in unpack_records(source.read_last_tick(time_ns - _RATE_NS, cursor_ns - 4 * _RATE_NS)[::-1])
        }
        for row in unpack_records(tick):
            key = (host, row["gpu"])
            rates = _compute_rates(before.get(row["gpu"]), row)
            found[key] = _build_gpu(key, names.get(key, "GPU"), row, rates, held.get(key, {}), used_by_job.get(key))
    return tuple(found[key] for key in sorted(found))


def _build_gpu(
    gpu_key: GpuKey, name: str, row: Values, rates: tuple[float, float], held: dict[str, int], used_by_job: int | None
) -> Gpu:
    return Gpu(
        host=gpu_key[0],
        index=gpu_key[1],
        name=name,
        total_bytes=int(row["total_bytes"]),
        used_bytes=max(0, int(row["used_bytes"])),
        allocated_bytes=held.get("allocated_bytes"),
        allocated_peak_bytes=held.get("allocated_peak_bytes"),
        reserved_bytes=held.get("reserved_bytes"),
        reserved_peak_bytes=held.get("reserved_peak_bytes"),
        process_bytes=used_by_job,
        utilization_percent=float(row["utilization_percent"]),
        power_w=float(row["power_w"]),
        temperature_c=float(row["temperature_c"]),
        pcie_tx_bytes_per_s=rates[0],
        pcie_rx_bytes_per_s=rates[1],
    )


def _sum_allocators(
    session: Session, cursor_ns: int, gpu_by_allocator: dict[int, GpuKey], peaks: Peaks, exits: ProcessExits
) -> Generator[None, None, dict[GpuKey, dict[str, int]]]:
    """What PyTorch's allocators on each GPU held at most, and hold where their process tells; by column, of all ranks."""
    by_rank: dict[tuple[GpuKey, int], dict[str, int]] = {}
    tables = [(session.sources["allocator"][place], key) for place, key in gpu_by_allocator.items()]
    for number, (source, key) in enumerate(sorted(tables, key=lambda table: table[0].created_ns), 1):
        if not number % RANKS_AT_ONCE:
            yield
        if known := source.count_until(cursor_ns):
            held = by_rank.setdefault((key, source.rank), {})
            over_ns = exits.reported_until(source)
            # A rank that was started again holds what its last process does.
            for column in ("allocated_bytes", "reserved_bytes"):
                held.pop(column, None)
                if over_ns is None or over_ns > cursor_ns:
                    held[column] = int(source.array[known - 1][column])
            for column in ("allocated_peak_bytes", "reserved_peak_bytes"):
                highest = max(peaks.peaks_until(source, column, cursor_ns, by="device").values())
                held[column] = max(highest, held.get(column, 0))
    yield
    found: dict[GpuKey, dict[str, int]] = {}
    for (key, _), held in by_rank.items():
        of_gpu = found.setdefault(key, {})
        for column, bytes_ in held.items():
            of_gpu[column] = of_gpu.get(column, 0) + bytes_
    return found


def _sum_job_bytes(session: Session, cursor_ns: int) -> Generator[None, None, dict[GpuKey, int]]:
    """In pieces NVML's figure for the ranks' processes on each GPU; none where it is not known."""
    ranks = {(source.host, source.pid) for source in session.sources["begins"]}
    found: dict[GpuKey, int] = {}
    ticks = find_last_ticks(session.sources["gpu_processes"], cursor_ns, cursor_ns - FRESH_NS)
    for number, (host, (_, tick)) in enumerate(ticks.items(), 1):
        if not number % NODES_AT_ONCE:
            yield
        for pid, gpu, used in zip(*(tick[name].tolist() for name in ("pid", "gpu", "used_bytes")), strict=True):
            if (host, pid) in ranks and used != UNKNOWN:
                found[host, gpu] = found.get((host, gpu), 0) + used
    return found


def _compute_rates(before: Values | None, row: Values) -> tuple[float, float]:
    """PCIe bytes per second each way since the tick a second before; NaN where not measured."""
    if before is None:
        return float("nan"), float("nan")
    seconds = (row["time_ns"] - before["time_ns"]) / 1e9
    rates = []
    for column in ("pcie_tx_bytes", "pcie_rx_bytes"):
        now, then = row[column], before[column]
        rate = (now - then) / seconds if seconds > 0 and now >= then >= 0 else float("nan")
        rates.append(rate if rate < _FASTEST_LINK else float("nan"))
    return rates[0], rates[1]
