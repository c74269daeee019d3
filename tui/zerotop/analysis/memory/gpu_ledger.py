"""Where a GPU's memory is at a cursor: rows that add up to the whole device, and what each of them rests on.

::

    device = free + driver + other processes + this job outside PyTorch + reserved but unallocated + allocated
    allocated = parameters + gradients + master weights + optimizer state + buffers + activations and temporaries
                + unexplained

The device's part is NVML's, reserved and allocated are the allocators' own counters, the categories are inventories of
tensors. They are read at different moments. Where NVML and an allocator disagree for that, the ledger is of the moment of
the allocator's reading: what was free then follows from the other rows, or is not told at all. What an inventory counted
and is not allocated any more is a row below zero. Nothing is cut off to make a sum come out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from zerotop.analysis.keys import GpuKey, ProcessKey
from zerotop.analysis.memory.device_rows import build_device_rows
from zerotop.analysis.memory.ledger_rows import (
    ACTIVATIONS,
    ALLOCATED,
    CUBLAS,
    FREED,
    UNALLOCATED,
    UNATTRIBUTED,
    UNEXPLAINED,
    GpuLedger,
    LedgerRow,
)
from zerotop.analysis.memory.nvml_snapshot import DeviceMemory, read_device_memory
from zerotop.analysis.memory.tensor_inventory import CATEGORIES, GRADIENTS, NO_INVENTORY, Inventory, read_inventory
from zerotop.analysis.processes import ranks_and_hosts
from zerotop.analysis.processes.alive_ranks import RankProcess, find_alive_processes, identify_process
from zerotop.analysis.processes.memo import CursorMemo
from zerotop.analysis.processes.process_exits import ProcessExits
from zerotop.session.reader import Event, Session, Source

_OPAQUE_NOTE = (
    "PyTorch shows no blocks of its allocator (cudaMallocAsync, or an allocator of the job's own):"
    " what is allocated cannot be told apart."
)
_BY_SIZE_NOTE = (
    "PyTorch shows no blocks of its allocator (cudaMallocAsync): tensors are counted by their own size, and what is rounded"
    " up or in nobody's hands is among activations and temporaries."
)
_NOT_READ_NOTE = (
    "This job has an allocator of device memory of its own, of which PyTorch has no counters: what it holds is NVML's figure"
    " alone."
)
_TAKEN_OUT_NOTE = "The probe was taken out of {who}: how this job's memory is divided since then is not known."
_HIDDEN_NOTE = (
    "NVML does not show this job's processes, as in a container: the job's is what the device uses beyond what it used"
    " when the recording began."
)
_HIDDEN_LATE_NOTE = (
    "NVML does not show this job's processes, as in a container, and recording began when they were there already:"
    " what is used outside PyTorch may be anybody's."
)
_NO_NVML_NOTE = "NVML was not to be had: of the device only what PyTorch holds is known."
_GIVEN_BACK_NOTE = (
    "This job has given memory back since PyTorch's allocator was last read: how it divides what is left is not known."
)
_MIG_NOTE = "This is an instance that MIG has cut out of a GPU: all figures are the instance's."


@dataclass(frozen=True, slots=True)
class Holder:
    """What one rank's allocator on a GPU held at a moment, and the inventory that applies."""

    process: RankProcess
    source: Source
    reserved_bytes: int
    allocated_bytes: int
    inventory: Inventory | None


def read_ledgers(session: Session, cursor_ns: int, gpu_keys: Collection[GpuKey] | None = None) -> tuple[GpuLedger, ...]:
    """All GPUs of the job's nodes, by host and index, as known at the cursor; empty where there are none.

    ``of``: only these of them.
    """
    found = find_holders(session, cursor_ns, gpu_keys)
    known = _find_gpu_keys(session, cursor_ns, gpu_keys) | set(found)
    keys = known if gpu_keys is None else known & set(gpu_keys)
    engines: dict[str, list[Event]] = {}
    for engine in read_engines(session, cursor_ns):
        engines.setdefault(engine.host, []).append(engine)
    return tuple(
        _build_gpu_ledger(session, key, cursor_ns, found.get(key, []), engines.get(key[0], [])) for key in sorted(keys)
    )


def find_holders(session: Session, cursor_ns: int, gpu_keys: Collection[GpuKey] | None = None) -> dict[GpuKey, list[Holder]]:
    """The living ranks' allocators by the GPU they lie on."""
    alive, ends = set(find_alive_processes(session, cursor_ns)), ProcessExits(_read_events(session, "left", cursor_ns))
    found: dict[GpuKey, list[Holder]] = {}
    for place, key in read_gpu_by_allocator(session, cursor_ns).items():
        if gpu_keys is not None and key not in gpu_keys:
            continue
        source = session.sources["allocator"][place]
        process, known = identify_process(source), source.count_until(cursor_ns)
        if process in alive and known and ends.reported_until(source) is None:
            last = source.array[known - 1]
            # An inventory that is newer than the reading would tell of other bytes.
            told = read_inventory(session, process, int(last["time_ns"]) + source.offset_ns)
            allocated = max(0, int(last["allocated_bytes"]))
            holder = Holder(process, source, max(allocated, int(last["reserved_bytes"])), allocated, told)
            found.setdefault(key, []).append(holder)
    return found


def read_gpu_by_allocator(session: Session, cursor_ns: int) -> dict[int, GpuKey]:
    """Place of an allocator's table in the session -> (host, index) of its GPU."""
    # A table that has been made and has no record yet lies nowhere.
    tables, begun = session.sources["allocator"], _STARTED_TABLES.get(session, 0)
    while begun < len(tables) and len(tables[begun].array):
        begun += 1
    _STARTED_TABLES[session] = begun
    if begun < len(tables):
        return _compute_gpu_by_allocator(session, cursor_ns)
    return _GPU_BY_ALLOCATOR.value_at(session, cursor_ns, lambda: _compute_gpu_by_allocator(session, cursor_ns))


_STARTED_TABLES: WeakKeyDictionary[Session, int] = WeakKeyDictionary()  # so many tables, from the first on, have records
_GPU_BY_ALLOCATOR: CursorMemo[dict[int, GpuKey]] = CursorMemo(("allocator",))


def _compute_gpu_by_allocator(session: Session, cursor_ns: int) -> dict[int, GpuKey]:
    return ranks_and_hosts.find_gpu_by_allocator(
        session, _read_events(session, "node", cursor_ns), read_engines(session, cursor_ns)
    )


def _read_events(session: Session, name: str, cursor_ns: int) -> list[Event]:
    return list(session.events_named(name, cursor_ns))


def read_engines(session: Session, cursor_ns: int) -> list[Event]:
    """The engines that were made up to the cursor."""
    return _read_events(session, "engine", cursor_ns)


def _find_gpu_keys(session: Session, cursor_ns: int, gpu_keys: Collection[GpuKey] | None) -> set[GpuKey]:
    """All that NVML showed on the nodes of these, or on all nodes."""
    hosts = None if gpu_keys is None else {host for host, _ in gpu_keys}
    ticks = ranks_and_hosts.find_last_ticks(
        (one for one in session.sources["gpus"] if hosts is None or one.host in hosts), cursor_ns
    )
    return {(host, int(index)) for host, (_, tick) in ticks.items() for index in np.unique(tick["gpu"])}


def _build_gpu_ledger(
    session: Session, gpu_key: GpuKey, cursor_ns: int, holders: list[Holder], engines: Sequence[Event]
) -> GpuLedger:
    """``engines``: those of its node."""
    allocators = [holder.source for holder in holders]
    seen = read_device_memory(session, gpu_key, cursor_ns, find_pids(session, gpu_key[0], cursor_ns), allocators)
    ranks = tuple(sorted(holder.process.rank for holder in holders))
    stale = seen is not None and seen.has_given_back
    holders = [] if stale else holders
    reserved = sum(holder.reserved_bytes for holder in holders)
    inside = (
        [LedgerRow(UNALLOCATED, reserved - sum(holder.allocated_bytes for holder in holders), _ALLOCATOR_BASIS)]
        if holders
        else []
    )
    inside += build_allocated_rows(holders)
    total = seen.total_bytes if seen is not None else find_capacity(engines, holders, reserved)
    rows = (*build_device_rows(seen, total, reserved, allocators_read=bool(holders)), *inside)
    return GpuLedger(
        host=gpu_key[0],
        index=gpu_key[1],
        name=find_gpu_name(session, gpu_key, cursor_ns),
        ranks=ranks,
        total_bytes=total,
        rows=rows,
        job_bytes=seen.job_bytes if seen is not None else None,
        reserved_bytes=reserved,
        allocated_bytes=sum(holder.allocated_bytes for holder in holders),
        unexplained_largest=_find_largest(holders),
        notes=(
            *((_GIVEN_BACK_NOTE,) if stale else ()),
            *collect_notes(engines, seen, holders),
            *_describe_not_read(session, gpu_key, cursor_ns, engines),
            *_describe_taken_out(session, gpu_key, cursor_ns),
        ),
    )


def find_engine_gpus(session: Session, cursor_ns: int, allocator: str | None = None) -> dict[ProcessKey, GpuKey]:
    """The GPU that each process (host, pid) says its engine is on, those with such an allocator or all."""
    engines = read_engines(session, cursor_ns)
    wanted = {(each.host, each.pid) for each in engines if allocator in (None, each.facts.get("allocator"))}
    on = ranks_and_hosts.locate_engines(_read_events(session, "node", cursor_ns), engines) if wanted else []
    return {process: key for process, key in on if process in wanted}


def _describe_taken_out(session: Session, gpu_key: GpuKey, cursor_ns: int) -> tuple[str, ...]:
    """Where a living rank on this GPU tells no more of its allocator."""
    left = _read_events(session, "left", cursor_ns)
    if not left:
        return ()
    ends = ProcessExits(left)
    tables = [
        session.sources["allocator"][place]
        for place, on in read_gpu_by_allocator(session, cursor_ns).items()
        if on == gpu_key
    ]
    told = {identify_process(source) for source in tables if ends.reported_until(source) is None}
    silent = sorted(
        one.rank for one in {*map(identify_process, tables)} - told if one in find_alive_processes(session, cursor_ns)
    )
    who = f"rank {silent[0]}" if len(silent) == 1 else f"{len(silent)} ranks"
    return (_TAKEN_OUT_NOTE.format(who=who),) if silent else ()


def _describe_not_read(session: Session, gpu_key: GpuKey, cursor_ns: int, engines: Sequence[Event]) -> tuple[str, ...]:
    """Where a living rank has an allocator on this GPU that has no counters."""
    if all(engine.facts.get("allocator") != "pluggable" for engine in engines):
        return ()
    on = find_engine_gpus(session, cursor_ns, "pluggable")
    alive = {(process.host, process.pid) for process in find_alive_processes(session, cursor_ns)} if on else set()
    return (_NOT_READ_NOTE,) if any(one == gpu_key and process in alive for process, one in on.items()) else ()


_ALLOCATOR_BASIS = "PyTorch's allocator, its last reading"


def build_allocated_rows(holders: Sequence[Holder]) -> list[LedgerRow]:
    """What the allocators have given out, by category, over all ranks of a GPU."""
    rows: dict[str, LedgerRow] = {}
    for holder in holders:
        for row in _build_rank_rows(holder.allocated_bytes, holder.inventory):
            before = rows.get(row.key)
            rows[row.key] = row if before is None else LedgerRow(row.key, before.bytes + row.bytes, row.basis, row.note)
    return [rows[key] for key in ALLOCATED if key in rows]


def _build_rank_rows(allocated: int, inventory: Inventory | None) -> list[LedgerRow]:
    if inventory is None or is_opaque(allocated, inventory):
        return [LedgerRow(UNATTRIBUTED, allocated, _ALLOCATOR_BASIS)]
    rows = [
        LedgerRow(name, inventory.device.get(name, 0), inventory.gradients_basis if name == GRADIENTS else inventory.basis)
        for name in CATEGORIES
    ]
    left = allocated - sum(row.bytes for row in rows)
    cublas = min(inventory.cublas_bytes, max(0, left))
    unexplained = min(inventory.unclaimed_bytes, max(0, left - cublas))
    rows.append(LedgerRow(ACTIVATIONS, max(0, left - cublas - unexplained), "what is left of allocated"))
    rows.append(LedgerRow(CUBLAS, cublas, inventory.basis))
    rows.append(LedgerRow(UNEXPLAINED, unexplained, inventory.basis))
    if left < 0:
        note = "Less is allocated than the inventory counted: some of it was moved away or freed since."
        rows.append(LedgerRow(FREED, left, "what is left of allocated", note))
    return rows


def is_opaque(allocated: int, inventory: Inventory) -> bool:
    """Whether the allocator shows none of its blocks although it has some, and tensors were not counted by their size."""
    return allocated > 0 and not inventory.blocks_bytes and not _is_counted_by_size(inventory)


def _is_counted_by_size(inventory: Inventory) -> bool:
    return inventory.blocks_bytes is None and bool(inventory.device)


def _find_largest(holders: Iterable[Holder]) -> tuple[int, ...]:
    sizes = [size for holder in holders if holder.inventory is not None for size in holder.inventory.unclaimed_largest]
    return tuple(sorted(sizes, reverse=True)[:10])


def find_pids(session: Session, host: str, cursor_ns: int) -> set[int]:
    """The process ids of the job on a node: its ranks, and the launchers that were sampled."""
    tables = ("begins", "allocator")
    pids = {source.pid for name in tables for source in session.host_sources(name, host)}
    for _, tick in ranks_and_hosts.find_last_ticks(session.host_sources("processes", host), cursor_ns).values():
        pids.update(np.unique(tick["pid"]).tolist())
    return pids


def find_gpu_name(session: Session, gpu_key: GpuKey, cursor_ns: int) -> str:
    """What NVML calls a GPU."""
    for event in reversed(_read_events(session, "node", cursor_ns)):
        for gpu in event.facts.get("gpus") or [] if event.host == gpu_key[0] else []:
            if gpu.get("index") == gpu_key[1]:
                return str(gpu.get("name") or "GPU")
    return "GPU"


def find_capacity(engines: Iterable[Event], holders: Sequence[Holder], reserved: int) -> int:
    """What PyTorch says that a device has; where nobody says, what is held of it."""
    mine = {(holder.process.host, holder.process.pid) for holder in holders}
    sizes: list[Any] = [
        device.get("total_bytes")
        for engine in engines
        if (engine.host, engine.pid) in mine
        for device in engine.facts.get("devices") or []
    ]
    return max([reserved, *(size for size in sizes if isinstance(size, int))])


def collect_notes(engines: Iterable[Event], device: DeviceMemory | None, holders: Sequence[Holder]) -> tuple[str, ...]:
    """What has to be said of a ledger as a whole."""
    found = []
    if holders and device is None:
        found.append(_NO_NVML_NOTE)
    if holders and device is not None and device.job_bytes is None:
        found.append(_HIDDEN_LATE_NOTE if device.before_bytes is None else _HIDDEN_NOTE)
    if any(holder.inventory is None for holder in holders):
        found.append(NO_INVENTORY)
    if any(h.inventory is not None and is_opaque(h.allocated_bytes, h.inventory) for h in holders):
        found.append(_OPAQUE_NOTE)
    if any(h.inventory is not None and _is_counted_by_size(h.inventory) for h in holders):
        found.append(_BY_SIZE_NOTE)
    mine = {(holder.process.host, holder.process.pid) for holder in holders}
    devices = [d for e in engines if (e.host, e.pid) in mine for d in e.facts.get("devices") or []]
    if any(str(d.get("uuid") or "").startswith("MIG-") or " MIG " in str(d.get("name") or "") for d in devices):
        found.append(_MIG_NOTE)
    return tuple(found)
