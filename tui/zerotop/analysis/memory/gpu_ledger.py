"""The use of a GPU's memory at a cursor: rows that add up to the whole device, each with its source.

::

    device = free + driver + other processes + this job outside PyTorch + reserved but unallocated + allocated
    allocated = parameters + gradients + master weights + optimizer state + buffers + kept by the script
                + grown since that was counted + activations and temporaries + unexplained

The device's part is NVML's, reserved and allocated are the allocators' own counters, the categories are inventories of
tensors. They are read at different moments. If NVML and an allocator disagree because of that, the ledger shows the moment
of the allocator's reading: the free memory then follows from the other rows, or is not shown at all. Tensors that an
inventory counted but that are no longer allocated make a row below zero. No row is adjusted to make a sum fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from zerotop.analysis.formatting import GIB, MIB, Text
from zerotop.analysis.memory import ledger_rows
from zerotop.analysis.memory.device_rows import build_device_rows
from zerotop.analysis.memory.gpu_holders import GpuHolder, find_engine_gpus, find_holders
from zerotop.analysis.memory.nvml_snapshot import DeviceMemory, read_device_memory
from zerotop.analysis.memory.tensor_inventory import GRADIENTS, NO_INVENTORY, Pool, TensorInventory
from zerotop.analysis.processes import ranks_and_hosts
from zerotop.recording.keys import GpuKey, identify_process
from zerotop.recording.moments.at import At
from zerotop.recording.moments.devices import locate_allocators, name_memory
from zerotop.recording.moments.process_exits import ProcessExits, find_alive_processes
from zerotop.recording.reader import Recording
from zerotop_probe.recording.events import Engine, EngineDevice, Left

# Gradients are gone if this share of them does not fit beside what outlives a step.
_FREED_SHARE = 0.9
_MOST_HELD, _NOTABLE_HELD = 2, 0.01  # variables that a note names, with at least this part of what the first one keeps
_LEAST_KEPT = 1 << 24  # bytes that outlive a step; a loss and the like are less
_LEAST_SPARSE = GIB  # unallocated bytes in almost free segments that a note tells
_ALLOCATOR = "PyTorch's allocator, its last reading"
_OUTDATED = "Memory has changed since the tensors were counted: their sizes may be outdated."
_ALLOCATOR_AT_PEAK = "PyTorch's allocator, at the peak"
_REST_OF_ALLOCATED = "allocated less the other rows"

_OPAQUE_NOTE = (
    "PyTorch shows no blocks of its allocator (cudaMallocAsync, or an allocator of the job's own): allocated memory cannot"
    " be divided."
)
_BY_SIZE_NOTE = (
    "PyTorch shows no blocks of its allocator (cudaMallocAsync): tensors are counted by their own size, and rounding and"
    " unreferenced memory are among activations and temporaries."
)
_NO_COUNTERS_NOTE = (
    "This job has an allocator of device memory of its own, without PyTorch's counters: NVML's figure is all that is known."
)
_PROBE_REMOVED_NOTE = "The probe was removed from {who}: the division of this job's memory since then is not known."
_HIDDEN_NOTE = (
    "NVML does not show this job's processes, as in a container: the job's memory is the device's use, less its use when"
    " the recording began."
)
_HIDDEN_LATE_NOTE = (
    "NVML does not show this job's processes, as in a container, and the recording began after they did: memory outside"
    " PyTorch may belong to anybody."
)
_NO_NVML_NOTE = "NVML was not available: only PyTorch's part of the device is known."
_RELEASED_NOTE = (
    "This job has released memory since PyTorch's allocator was last read: the division of the rest is not known."
)
_UNIFIED_NOTE = "Unified memory: GPU and host share one pool. NVML has no figure of it; /proc/meminfo takes its place."
_CUDA_FREE = " When the training began cudaMemGetInfo said that {free:bytes} were free, without what the host caches."
_MIG_NOTE = "This is a MIG instance of a GPU: all figures are the instance's."


def read_ledgers(at: At, gpu_keys: Collection[GpuKey] | None = None) -> tuple[ledger_rows.GpuLedger, ...]:
    """Return the ledgers of the job's nodes at the cursor by host and index, of ``gpu_keys`` or of all GPUs."""
    holders = find_holders(at, gpu_keys)
    known = _find_gpu_keys(at, gpu_keys) | set(holders)
    keys = known if gpu_keys is None else known & set(gpu_keys)
    engines: dict[str, list[Engine]] = {}
    for engine in at.events_of(Engine):
        engines.setdefault(engine.writer.host, []).append(engine)
    return tuple(build_ledger(at, key, holders.get(key, []), engines.get(key[0], [])) for key in sorted(keys))


def read_ledger(at: At, gpu_key: GpuKey, holders: Sequence[GpuHolder]) -> ledger_rows.GpuLedger | None:
    """Return the ledger of one GPU with these allocators; None if neither they nor NVML show it."""
    if not holders and gpu_key not in _find_gpu_keys(at, [gpu_key]):
        return None
    engines = [engine for engine in at.events_of(Engine) if engine.writer.host == gpu_key[0]]
    return build_ledger(at, gpu_key, holders, engines)


def _find_gpu_keys(at: At, gpu_keys: Collection[GpuKey] | None) -> set[GpuKey]:
    """Return the GPUs that NVML showed on the nodes of ``gpu_keys``, or on all nodes."""
    hosts = None if gpu_keys is None else {host for host, _ in gpu_keys}
    sources = (source for source in at.sources["gpus"] if hosts is None or source.host in hosts)
    ticks = ranks_and_hosts.find_last_ticks(sources, at.cursor_ns)
    return {(host, int(index)) for host, (_, tick) in ticks.items() for index in np.unique(tick["gpu"])}


def build_ledger(
    at: At,
    gpu_key: GpuKey,
    holders: Sequence[GpuHolder],
    engines: Sequence[Engine],
    *,
    at_peak: bool = False,
    until_ns: int | None = None,
) -> ledger_rows.GpuLedger:
    """Return one GPU's ledger.

    Args:
        holders: the allocators on the GPU.
        engines: the ``engine`` events of its node.
        at_peak: the first holder is at its peak, not at its last reading.
        until_ns: up to when readings of NVML may count that are later than the cursor.
    """
    host, index = gpu_key
    allocators = [holder.source for holder in holders]
    device = read_device_memory(at, gpu_key, find_pids(at, host), allocators, until_ns=until_ns)
    ranks = tuple(sorted(holder.process.rank for holder in holders))
    has_released = device is not None and device.has_given_back and not at_peak
    if has_released:
        holders = ()
    reserved, allocated = (sum(getattr(h, name) for h in holders) for name in ("reserved_bytes", "allocated_bytes"))
    devices = _list_devices(engines, holders)
    total = device.total_bytes if device is not None else _find_capacity(devices, reserved)
    rows = build_device_rows(device, total, reserved, allocators_read=bool(holders))
    if device is not None and device.by_other_ranks and any(row.key == ledger_rows.OTHER_RANKS for row in rows):
        note = _describe_contexts(at.recording, host, device)
        rows = [replace(row, note=note) if row.key == ledger_rows.OTHER_RANKS else row for row in rows]
    if holders:
        rows += _build_unallocated_rows(holders, reserved - allocated, at_peak=at_peak)
        rows += _build_allocated_rows(holders)
    notes = [_RELEASED_NOTE] if has_released else []
    notes += _iter_notes(device, holders, devices)
    notes += [_OUTDATED] if any(row.is_outdated for row in rows) else []
    if not at_peak:
        notes += _iter_blind_spots(at, gpu_key, engines)
    return ledger_rows.GpuLedger(
        host=host,
        index=index,
        name=name_memory(at, gpu_key),
        ranks=ranks,
        total_bytes=total,
        rows=tuple(rows),
        job_bytes=device.job_bytes if device is not None and not at_peak else None,
        reserved_bytes=reserved,
        allocated_bytes=allocated,
        unexplained_largest=_find_largest(holders[:1] if at_peak else holders),
        notes=tuple(notes),
        is_unified=device is not None and device.is_unified,
    )


def _describe_unified(devices: Sequence[EngineDevice]) -> str:
    """Return a sentence about the source of the figures, and CUDA's own where it is known."""
    free = next((Text(_CUDA_FREE, {"free": one.free_bytes}) for one in devices if one.free_bytes), "")
    return f"{_UNIFIED_NOTE}{free}"


def _describe_contexts(recording: Recording, host: str, device: DeviceMemory) -> Text:
    """Return a sentence about the processes of the job that hold memory here and train on another GPU."""
    known = {source.pid: source.rank for source in recording.host_sources("begins", host)}
    values: dict[str, Any] = {}
    for number, (pid, size) in enumerate(device.by_other_ranks[:_MOST_HELD]):
        who = f"rank {known[pid]}" if pid in known else f"process {pid} of the job"
        values |= {f"size{number}": size, f"who{number}": who}
    parts = [f"{{who{number}}} {{size{number}:size}}" for number in range(len(values) // 2)]
    return Text(f"Held here by processes that train on other GPUs: {', '.join(parts)}.", values)


# --- the device ----------------------------------------------------------------------------------------------------------


def find_pids(at: At, host: str) -> set[int]:
    """Return the process ids of the job on a node: its ranks, and the launchers that were sampled."""
    pids = {source.pid for table in ("begins", "allocator") for source in at.host_sources(table, host)}
    for _, tick in ranks_and_hosts.find_last_ticks(at.host_sources("processes", host), at.cursor_ns).values():
        pids.update(np.unique(tick["pid"]).tolist())
    return pids


def _list_devices(engines: Sequence[Engine], holders: Sequence[GpuHolder]) -> list[EngineDevice]:
    """Return PyTorch's descriptions of the holders' devices."""
    processes = {(holder.process.host, holder.process.pid) for holder in holders}
    own = (engine for engine in engines if engine.process_key in processes)
    return [device for engine in own for device in engine.devices or []]


def _find_capacity(devices: Sequence[EngineDevice], reserved: int) -> int:
    """Return a device's bytes by PyTorch; else the bytes that are reserved on it."""
    return max([reserved, *(device.total_bytes or 0 for device in devices)])


# --- allocated -----------------------------------------------------------------------------------------------------------


def _build_unallocated_rows(holders: Sequence[GpuHolder], unallocated: int, *, at_peak: bool) -> list[ledger_rows.LedgerRow]:
    """Return reserved memory without tensors: what any allocation can use, and what only a stream or a pool can."""
    rows: list[ledger_rows.LedgerRow] = []
    left = unallocated
    for key, is_meant in ((ledger_rows.OTHER_STREAMS, _is_of_other_stream), (ledger_rows.PRIVATE, _is_private)):
        for inventory in (holder.inventory for holder in holders if holder.inventory is not None and not at_peak):
            size = min(left, sum(pool.reserved - pool.allocated for pool in inventory.pools if is_meant(pool)))
            if size > 0:
                rows.append(ledger_rows.LedgerRow(key, size, inventory.basis))
                left -= size
    merged = {row.key: replace(row, bytes=sum(other.bytes for other in rows if other.key == row.key)) for row in rows}
    return [
        ledger_rows.LedgerRow(
            ledger_rows.UNALLOCATED,
            left,
            _ALLOCATOR_AT_PEAK if at_peak else _ALLOCATOR,
            "" if at_peak else _describe_sparse(holders, left),
        ),
        *merged.values(),
    ]


def _describe_sparse(holders: Sequence[GpuHolder], unallocated: int) -> str:
    """Return a sentence about unallocated memory in segments that are almost free, where it is much."""
    pools = [pool for holder in holders if holder.inventory is not None for pool in holder.inventory.pools]
    sparse = min(unallocated, sum(pool.sparse for pool in pools if pool.is_current and not pool.is_private))
    if sparse < _LEAST_SPARSE:
        return ""
    text = "{sparse:size} of the unallocated memory are in segments that small blocks keep from the driver."
    return Text(text, {"sparse": sparse})


def _is_of_other_stream(pool: Pool) -> bool:
    return not pool.is_current and not pool.is_private


def _is_private(pool: Pool) -> bool:
    return pool.is_private


def _build_allocated_rows(holders: Sequence[GpuHolder]) -> list[ledger_rows.LedgerRow]:
    """Return allocated memory by category, over all ranks of a GPU."""
    rows: dict[str, ledger_rows.LedgerRow] = {}
    for holder in holders:
        for row in _build_rank_rows(holder):
            before = rows.get(row.key)
            rows[row.key] = row if before is None else replace(row, bytes=before.bytes + row.bytes)
    return [rows[key] for key in ledger_rows.ALLOCATED if key in rows]


def _build_rank_rows(holder: GpuHolder) -> list[ledger_rows.LedgerRow]:
    allocated, inventory = holder.allocated_bytes, holder.inventory
    if inventory is None or _is_opaque(allocated, inventory):
        return [ledger_rows.LedgerRow(ledger_rows.UNATTRIBUTED, allocated, _ALLOCATOR)]
    rows = [
        ledger_rows.LedgerRow(
            name, inventory.device.get(name, 0), inventory.gradients_basis if name == GRADIENTS else inventory.basis
        )
        for name in inventory.categories
    ]
    left = allocated - sum(row.bytes for row in rows)
    freed = _find_freed_gradients(inventory, left)
    rows = [replace(row, bytes=row.bytes - freed) if row.key == GRADIENTS else row for row in rows]
    if holder.has_changed:
        rows = [replace(row, is_outdated=True) for row in rows]
    left += freed
    cublas = min(inventory.cublas_bytes, max(0, left))
    held = min(inventory.held_bytes, max(0, left - cublas))
    kept, grown = holder.kept, _build_grown_row(holder, left - cublas - held)
    rest = max(0, left - cublas - held - (grown.bytes if grown is not None else 0))
    unexplained = min(inventory.unclaimed_bytes, rest)
    since = holder.unread_since
    left_since = f", with what steps since {since} have left" if since is not None and grown is not None else ""
    temporary = ledger_rows.LedgerRow(ledger_rows.ACTIVATIONS, rest - unexplained, f"{_REST_OF_ALLOCATED}{left_since}")
    if kept is not None and temporary.bytes:
        is_kept = kept.is_between_steps and since is None and temporary.bytes >= _LEAST_KEPT
        temporary = replace(temporary, is_kept=is_kept, growth_bytes=kept.growth_bytes if grown is None else 0)
    rows.append(temporary)
    if held:
        note = describe_held(inventory) if held >= MIB else ""  # of less it would say "0.0 MiB"
        rows.append(ledger_rows.LedgerRow(ledger_rows.HELD, held, inventory.held_basis, note))
    if grown is not None:
        rows.append(grown)
    rows.append(ledger_rows.LedgerRow(ledger_rows.CUBLAS, cublas, inventory.basis))
    rows.append(ledger_rows.LedgerRow(ledger_rows.UNEXPLAINED, unexplained, inventory.basis))
    if left < 0:
        note = "Less is allocated than the inventory counted: some of it was moved away or freed since."
        rows.append(ledger_rows.LedgerRow(ledger_rows.FREED, left, _REST_OF_ALLOCATED, note))
    return rows


def _build_grown_row(holder: GpuHolder, most: int) -> ledger_rows.LedgerRow | None:
    """Return what steps have left since tensors, or their holders, were counted: at most the bytes in no other row."""
    growth = holder.growth
    if growth is None or most <= 0:
        return None
    basis = f"allocated after step {growth.until_step} less that counted in step {growth.since_step}"
    per_step = holder.kept.growth_bytes if holder.kept is not None else 0
    return ledger_rows.LedgerRow(
        ledger_rows.GROWN, min(growth.bytes, most), basis, growth_bytes=per_step, since_step=growth.since_step
    )


def _find_freed_gradients(inventory: TensorInventory, left: int) -> int:
    """Return the bytes of gradients that are gone: ``left`` bytes must hold what outlives a step."""
    gradients = inventory.device.get(GRADIENTS, 0) if inventory.may_free_gradients else 0
    lasting = inventory.cublas_bytes + inventory.held_bytes + inventory.unclaimed_bytes
    # zero_grad() frees all of them.
    if not inventory.has_gradients and lasting - left >= _FREED_SHARE * gradients:
        return gradients
    return min(max(0, -left), gradients)


def describe_held(inventory: TensorInventory) -> Text:
    """Return a sentence about the variables that keep the most device memory."""
    values: dict[str, Any] = {}
    most = inventory.held[0].bytes if inventory.held else 0
    notable = [one for one in inventory.held[:_MOST_HELD] if one.bytes >= _NOTABLE_HELD * most]
    for number, one in enumerate(notable):
        values |= {f"size{number}": one.bytes, f"text{number}": one.text}
    parts = [f"{{text{number}}} {{size{number}:size}}" for number in range(len(values) // 2)]
    counted = f", {inventory.held_basis.removeprefix('tensors ')}" if inventory.held_basis else ""
    return Text(f"Kept by the script{counted}: {', '.join(parts)}.", values)


def _is_opaque(allocated: int, inventory: TensorInventory) -> bool:
    """Return whether the allocator has blocks but shows none, and tensors were not counted by their size."""
    return allocated > 0 and not inventory.blocks_bytes and not _is_counted_by_size(inventory)


def _is_counted_by_size(inventory: TensorInventory) -> bool:
    return inventory.blocks_bytes is None and bool(inventory.device)


def _find_largest(holders: Sequence[GpuHolder]) -> tuple[int, ...]:
    sizes = [size for holder in holders if holder.inventory is not None for size in holder.inventory.unclaimed_largest]
    return tuple(sorted(sizes, reverse=True)[:10])


# --- notes ---------------------------------------------------------------------------------------------------------------


def _iter_notes(device: DeviceMemory | None, holders: Sequence[GpuHolder], devices: Sequence[EngineDevice]) -> Iterator[str]:
    if holders and device is None:
        yield _NO_NVML_NOTE
    if device is not None and device.is_unified:
        yield _describe_unified(devices)
    elif holders and device is not None and device.job_bytes is None:
        yield _HIDDEN_LATE_NOTE if device.before_bytes is None else _HIDDEN_NOTE
    inventories = [holder.inventory for holder in holders if holder.inventory is not None]
    if len(inventories) < len(holders):
        yield NO_INVENTORY
    yield from filter(None, (inventory.describe_optimizer_states(on_device=True) for inventory in inventories))
    if any(h.inventory is not None and _is_opaque(h.allocated_bytes, h.inventory) for h in holders):
        yield _OPAQUE_NOTE
    if any(map(_is_counted_by_size, inventories)):
        yield _BY_SIZE_NOTE
    if any((one.uuid or "").startswith("MIG-") or " MIG " in (one.name or "") for one in devices):
        yield _MIG_NOTE


def _iter_blind_spots(at: At, gpu_key: GpuKey, engines: Sequence[Engine]) -> Iterator[str]:
    """Yield a note where a living rank's allocator has no counters, and where its probe was removed."""
    if any(engine.allocator == "pluggable" for engine in engines):
        alive = {(process.host, process.pid) for process in find_alive_processes(at)}
        gpus = find_engine_gpus(at, "pluggable")
        if any(key == gpu_key and process in alive for process, key in gpus.items()):
            yield _NO_COUNTERS_NOTE
    left = at.events_of(Left)
    if not left:
        return
    exits = ProcessExits(left)
    tables = [source for source, key in locate_allocators(at).items() if key == gpu_key]
    recording = {identify_process(source) for source in tables if exits.reported_until(source) is None}
    silent = {*map(identify_process, tables)} - recording
    ranks = sorted(process.rank for process in find_alive_processes(at) if process in silent)
    if ranks:
        yield _PROBE_REMOVED_NOTE.format(who=f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks")
