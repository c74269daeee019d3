"""GPUs at a cursor, from samples."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from zerotop.analysis.keys import GpuKey
from zerotop.analysis.live_view import Gpu
from zerotop.analysis.processes.devices import FASTEST_LINK
from zerotop.analysis.processes.process_exits import ProcessExits
from zerotop.analysis.processes.ranks_and_hosts import (
    Values,
    find_last_ticks,
    unpack_records,
)
from zerotop.analysis.processes.running_max import Peaks
from zerotop.analysis.processes.thinned import find_folded_peak, is_thinned_at
from zerotop.session.reader import Session
from zerotop_probe.recording.events import Node
from zerotop_probe.recording.tables import FRESH_NS, GPUS, UNKNOWN

_RATE_NS = 1_000_000_000
_PEAK_COLUMNS = ("allocated_peak_bytes", "reserved_peak_bytes")


def read_gpus(
    session: Session,
    cursor_ns: int,
    nodes: Iterable[Node],
    gpu_by_allocator: dict[int, GpuKey],
    peaks: Peaks,
    exits: ProcessExits,
) -> tuple[Gpu, ...]:
    """Return each GPU as last sampled, with the memory of PyTorch's allocators on it.

    ``gpu_by_allocator``: see :func:`zerotop.analysis.processes.ranks_and_hosts.find_gpu_by_allocator`.
    """
    held = _sum_allocators(session, cursor_ns, gpu_by_allocator, peaks, exits)
    used_by_job = _sum_job_bytes(session, cursor_ns)
    names = {(node.writer.host, gpu.index): gpu.name for node in nodes for gpu in node.gpus or []}
    ranks: dict[GpuKey, set[int]] = {}
    for place, key in gpu_by_allocator.items():
        ranks.setdefault(key, set()).add(session.sources["allocator"][place].rank)
    gpus = {}
    for host, (source, tick) in find_last_ticks(session.sources["gpus"], cursor_ns).items():
        time_ns = int(tick["time_ns"][-1]) + source.offset_ns
        before = {
            row["gpu"]: row
            for row in unpack_records(source.read_last_tick(time_ns - _RATE_NS, cursor_ns - 4 * _RATE_NS)[::-1])
        }
        for row in unpack_records(tick):
            key = (host, row["gpu"])
            rates = _compute_rates(before.get(row["gpu"]), row)
            gpu = _build_gpu(key, names.get(key, "GPU"), row, rates, held.get(key, {}), used_by_job.get(key))
            gpus[key] = replace(gpu, ranks=tuple(sorted(ranks.get(key, ()))))
    return tuple(gpus[key] for key in sorted(gpus))


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
        pcie_tx_bytes_per_s=rates[0],
        pcie_rx_bytes_per_s=rates[1],
        sample={field.name: row.get(field.name, math.nan) for field in GPUS.fields},
    )


def _sum_allocators(
    session: Session, cursor_ns: int, gpu_by_allocator: dict[int, GpuKey], peaks: Peaks, exits: ProcessExits
) -> dict[GpuKey, dict[str, int]]:
    """Sum over ranks the memory that PyTorch's allocators hold on each GPU, unless exited, and its maximum, by column."""
    by_rank: dict[tuple[GpuKey, int], dict[str, int]] = {}
    tables = [(session.sources["allocator"][place], key) for place, key in gpu_by_allocator.items()]
    for source, key in sorted(tables, key=lambda table: table[0].created_ns):
        if (count := source.count_until(cursor_ns)) and not is_thinned_at(session, source, cursor_ns):
            held = by_rank.setdefault((key, source.rank), {})
            exit_ns = exits.reported_until(source)
            # After a restart, only the last process of a rank holds memory.
            for column in ("allocated_bytes", "reserved_bytes"):
                held.pop(column, None)
                if exit_ns is None or exit_ns > cursor_ns:
                    held[column] = int(source.array[count - 1][column])
            devices = peaks.peaks_until(source, _PEAK_COLUMNS, cursor_ns, by="device").values()
            for column, *highest in zip(_PEAK_COLUMNS, *devices, strict=True):
                held[column] = max(*highest, find_folded_peak(session, source, column, cursor_ns), held.get(column, 0))
    sums: dict[GpuKey, dict[str, int]] = {}
    for (key, _), held in by_rank.items():
        gpu_sums = sums.setdefault(key, {})
        for column, bytes_ in held.items():
            gpu_sums[column] = gpu_sums.get(column, 0) + bytes_
    return sums


def _sum_job_bytes(session: Session, cursor_ns: int) -> dict[GpuKey, int]:
    """Return NVML's memory of the rank processes on each GPU; none where unknown."""
    ranks = {(source.host, source.pid) for source in session.sources["begins"]}
    used_bytes: dict[GpuKey, int] = {}
    ticks = find_last_ticks(session.sources["gpu_processes"], cursor_ns, cursor_ns - FRESH_NS)
    for host, (_, tick) in ticks.items():
        for pid, gpu, used in zip(*(tick[name].tolist() for name in ("pid", "gpu", "used_bytes")), strict=True):
            if (host, pid) in ranks and used != UNKNOWN:
                used_bytes[host, gpu] = used_bytes.get((host, gpu), 0) + used
    return used_bytes


def _compute_rates(before: Values | None, row: Values) -> tuple[float, float]:
    """Return PCIe bytes per second each way since the tick a second before; NaN where not measured."""
    if before is None:
        return float("nan"), float("nan")
    seconds = (row["time_ns"] - before["time_ns"]) / 1e9
    rates = []
    for column in ("pcie_tx_bytes", "pcie_rx_bytes"):
        now, then = row[column], before[column]
        rate = (now - then) / seconds if seconds > 0 and now >= then >= 0 else float("nan")
        rates.append(rate if rate < FASTEST_LINK else float("nan"))
    return rates[0], rates[1]
