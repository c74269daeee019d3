"""GPUs at a cursor, from samples."""

from __future__ import annotations

import math

from zerotop.analysis.live_view import Gpu
from zerotop.analysis.memory.gpu_holders import find_failed_allocation
from zerotop.analysis.processes.ranks_and_hosts import Values, find_last_ticks, unpack_records
from zerotop.analysis.processes.running_max import find_peaks
from zerotop.analysis.processes.thinned import find_folded_peak, is_thinned_at
from zerotop.recording.keys import GpuKey, identify_process
from zerotop.recording.moments.at import At
from zerotop.recording.moments.devices import FASTEST_LINK, find_limit, locate_allocators, name_memory, read_devices
from zerotop.recording.moments.process_exits import read_exits
from zerotop_probe.recording.events import Engine, OutOfMemory
from zerotop_probe.recording.tables import FRESH_NS, GPUS, UNKNOWN

_RATE_NS = 1_000_000_000
_NO_SAMPLE = {field.name: math.nan for field in GPUS.fields}
_PEAK_COLUMNS = ("allocated_peak_bytes", "reserved_peak_bytes")


def read_gpus(at: At) -> tuple[Gpu, ...]:
    """Return each GPU as last sampled, with the memory of PyTorch's allocators on it."""
    held = _sum_allocators(at)
    used_by_job = _sum_job_bytes(at)
    ranks: dict[GpuKey, set[int]] = {}
    for allocator, key in locate_allocators(at).items():
        ranks.setdefault(key, set()).add(allocator.rank)
    gpus = {}
    for host, (source, tick) in find_last_ticks(at.sources["gpus"], at.cursor_ns).items():
        time_ns = int(tick["time_ns"][-1]) + source.offset_ns
        before = {
            row["gpu"]: row
            for row in unpack_records(source.read_last_tick(time_ns - _RATE_NS, at.cursor_ns - 4 * _RATE_NS)[::-1])
        }
        for row in unpack_records(tick):
            key = (host, row["gpu"])
            rates = _compute_rates(before.get(row["gpu"]), row)
            own_ranks = tuple(sorted(ranks.get(key, ())))
            gpus[key] = _build_gpu(at, key, own_ranks, row, rates, held.get(key, {}), used_by_job.get(key))
    for key in read_devices(at).unified - gpus.keys():  # NVML is not there at all, as on some Jetsons
        host_row = at.records("hosts", key[0]).read_last(at.cursor_ns)
        if host_row is not None and (total := int(host_row["memory_total_bytes"])) > 0:
            row = {"total_bytes": total, "used_bytes": total - int(host_row["memory_available_bytes"])}
            unknown = math.nan, math.nan
            gpus[key] = _build_gpu(at, key, tuple(sorted(ranks.get(key, ()))), row, unknown, held.get(key, {}), None)
    return tuple(gpus[key] for key in sorted(gpus))


def _build_gpu(
    at: At,
    gpu_key: GpuKey,
    ranks: tuple[int, ...],
    row: Values,
    rates: tuple[float, float],
    held: dict[str, int],
    used_by_job: int | None,
) -> Gpu:
    return Gpu(
        host=gpu_key[0],
        index=gpu_key[1],
        name=name_memory(at, gpu_key),
        ranks=ranks,
        total_bytes=int(row["total_bytes"]),
        used_bytes=max(0, int(row["used_bytes"])),
        allocated_bytes=held.get("allocated_bytes"),
        allocated_peak_bytes=held.get("allocated_peak_bytes"),
        reserved_bytes=held.get("reserved_bytes"),
        reserved_peak_bytes=held.get("reserved_peak_bytes"),
        process_bytes=used_by_job,
        pcie_tx_bytes_per_s=rates[0],
        pcie_rx_bytes_per_s=rates[1],
        sample=_NO_SAMPLE | row,
        allowed_bytes=_find_allowed(at, gpu_key, int(row["total_bytes"])) if len(ranks) == 1 else None,
    )


def _find_allowed(at: At, gpu_key: GpuKey, total_bytes: int) -> int | None:
    """Return what PyTorch may reserve in a process on a GPU, if it is less than the device."""
    processes = {identify_process(source) for source, key in locate_allocators(at).items() if key == gpu_key}
    limits = (
        find_limit(total_bytes, next(reversed(at.process_events(Engine, one)), None), at.process_events(OutOfMemory, one))
        for one in processes
    )
    return next((limit for limit in limits if limit is not None), None)


def _sum_allocators(at: At) -> dict[GpuKey, dict[str, int]]:
    """Sum over ranks the memory that PyTorch's allocators hold on each GPU, unless exited, and its maximum, by column."""
    by_rank: dict[tuple[GpuKey, int], dict[str, int]] = {}
    exits, has_failures = read_exits(at), bool(at.events_of(OutOfMemory))
    for source, key in sorted(locate_allocators(at).items(), key=lambda table: table[0].created_ns):
        if (count := source.count_until(at.cursor_ns)) and not is_thinned_at(at, source):
            held = by_rank.setdefault((key, source.rank), {})
            exit_ns, last = exits.reported_until(source), source.array[count - 1]
            failed = None
            if has_failures:
                failed = find_failed_allocation(at, identify_process(source), int(last["time_ns"]) + source.offset_ns)
            now = failed[:2] if failed is not None else (int(last["allocated_bytes"]), int(last["reserved_bytes"]))
            # After a restart, only the last process of a rank holds memory.
            for column, size in zip(("allocated_bytes", "reserved_bytes"), now, strict=True):
                held.pop(column, None)
                if exit_ns is None:
                    held[column] = size
            devices = find_peaks(source, _PEAK_COLUMNS, at.cursor_ns, by="device").values()
            for column, size, *highest in zip(_PEAK_COLUMNS, now, *devices, strict=True):
                held[column] = max(size, *highest, find_folded_peak(at, source, column), held.get(column, 0))
    sums: dict[GpuKey, dict[str, int]] = {}
    for (key, _), held in by_rank.items():
        gpu_sums = sums.setdefault(key, {})
        for column, bytes_ in held.items():
            gpu_sums[column] = gpu_sums.get(column, 0) + bytes_
    return sums


def _sum_job_bytes(at: At) -> dict[GpuKey, int]:
    """Return NVML's memory of the rank processes on each GPU; none where unknown."""
    ranks = {(source.host, source.pid) for source in at.sources["begins"]}
    used_bytes: dict[GpuKey, int] = {}
    ticks = find_last_ticks(at.sources["gpu_processes"], at.cursor_ns, at.cursor_ns - FRESH_NS)
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
