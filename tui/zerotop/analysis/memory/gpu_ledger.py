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

from zerotop.analysis.memory.device_rows import device_rows
from zerotop.analysis.memory.ledger_rows import (
    ACTIVATIONS,
    ALLOCATED,
    CUBLAS,
    FREED,
    UNALLOCATED,
    UNATTRIBUTED,
    UNEXPLAINED,
    GpuLedger,
    Row,
)
from zerotop.analysis.memory.nvml_snapshot import Key, Look, look
from zerotop.analysis.memory.tensor_inventory import CATEGORIES, GRADIENTS, NO_INVENTORY, Inventory, inventory
from zerotop.analysis.processes import ranks_and_hosts
from zerotop.analysis.processes.alive_ranks import Process, living, process_of
from zerotop.analysis.processes.memo import Memo
from zerotop.analysis.processes.process_exits import Ends
from zerotop.session.reader import Event, Session, Source

_OPAQUE = (
    "PyTorch shows no blocks of its allocator (cudaMallocAsync, or an allocator of the job's own):"
    " what is allocated cannot be told apart."
)
_BY_SIZE = (
    "PyTorch shows no blocks of its allocator (cudaMallocAsync): tensors are counted by their own size, and what is rounded"
    " up or in nobody's hands is among activations and temporaries."
)
_NOT_READ = (
    "This job has an allocator of device memory of its own, of which PyTorch has no counters: what it holds is NVML's figure"
    " alone."
)
_TAKEN_OUT = "The probe was taken out of {who}: how this job's memory is divided since then is not known."
_HIDDEN = (
    "NVML does not show this job's processes, as in a container: the job's is what the device uses beyond what it used"
    " when the recording began."
)
_HIDDEN_LATE = (
    "NVML does not show this job's processes, as in a container, and recording began when they were there already:"
    " what is used outside PyTorch may be anybody's."
)
_NO_NVML = "NVML was not to be had: of the device only what PyTorch holds is known."
_GIVEN_BACK = (
    "This job has given memory back since PyTorch's allocator was last read: how it divides what is left is not known."
)
_MIG = "This is an instance that MIG has cut out of a GPU: all figures are the instance's."


@dataclass(frozen=True, slots=True)
class Holder:
    """What one rank's allocator on a GPU held at a moment, and the inventory that applies."""

    process: Process
    source: Source
    reserved_bytes: int
    allocated_bytes: int
    inventory: Inventory | None


def ledger(session: Session, cursor_ns: int, of: Collection[Key] | None = None) -> tuple[GpuLedger, ...]:
    """All GPUs of the job's nodes, by host and index, as known at the cursor; empty where there are none.

    ``of``: only these of them.
    """
    found = holders(session, cursor_ns, of)
    known = _gpus(session, cursor_ns, of) | set(found)
    keys = known if of is None else known & set(of)
    engines: dict[str, list[Event]] = {}
    for engine in engines_until(session, cursor_ns):
        engines.setdefault(engine.host, []).append(engine)
    return tuple(_gpu_ledger(session, key, cursor_ns, found.get(key, []), engines.get(key[0], [])) for key in sorted(keys))


def holders(session: Session, cursor_ns: int, of: Collection[Key] | None = None) -> dict[Key, list[Holder]]:
    """The living ranks' allocators by the GPU they lie on."""
    alive, ends = set(living(session, cursor_ns)), Ends(_until(session, "left", cursor_ns))
    found: dict[Key, list[Holder]] = {}
    for place, key in lies_on(session, cursor_ns).items():
        if of is not None and key not in of:
            continue
        source = session.sources["allocator"][place]
        process, known = process_of(source), source.count_known(cursor_ns)
        if process in alive and known and ends.told_until(source) is None:
            last = source.array[known - 1]
            # An inventory that is newer than the reading would tell of other bytes.
            told = inventory(session, process, int(last["time_ns"]) + source.offset_ns)
            allocated = max(0, int(last["allocated_bytes"]))
            holder = Holder(process, source, max(allocated, int(last["reserved_bytes"])), allocated, told)
            found.setdefault(key, []).append(holder)
    return found


def lies_on(session: Session, cursor_ns: int) -> dict[int, Key]:
    """Place of an allocator's table in the session -> (host, index) of its GPU."""
    # A table that has been made and has no record yet lies nowhere.
    tables, begun = session.sources["allocator"], _BEGUN.get(session, 0)
    while begun < len(tables) and len(tables[begun].array):
        begun += 1
    _BEGUN[session] = begun
    if begun < len(tables):
        return _lies_on(session, cursor_ns)
    return _PLACED.at(session, cursor_ns, lambda: _lies_on(session, cursor_ns))


_BEGUN: WeakKeyDictionary[Session, int] = WeakKeyDictionary()  # so many tables, from the first on, have records
_PLACED: Memo[dict[int, Key]] = Memo(("allocator",))


def _lies_on(session: Session, cursor_ns: int) -> dict[int, Key]:
    return ranks_and_hosts.allocators(session, _until(session, "node", cursor_ns), engines_until(session, cursor_ns))


def _until(session: Session, name: str, cursor_ns: int) -> list[Event]:
    return list(session.told(name, cursor_ns))


def engines_until(session: Session, cursor_ns: int) -> list[Event]:
    """The engines that were made up to the cursor."""
    return _until(session, "engine", cursor_ns)


def _gpus(session: Session, cursor_ns: int, of: Collection[Key] | None) -> set[Key]:
    """All that NVML showed on the nodes of these, or on all nodes."""
    hosts = None if of is None else {host for host, _ in of}
    ticks = ranks_and_hosts.last_ticks(
        (one for one in session.sources["gpus"] if hosts is None or one.host in hosts), cursor_ns
    )
    return {(host, int(index)) for host, (_, tick) in ticks.items() for index in np.unique(tick["gpu"])}


def _gpu_ledger(session: Session, key: Key, cursor_ns: int, held: list[Holder], engines: Sequence[Event]) -> GpuLedger:
    """``engines``: those of its node."""
    allocators = [holder.source for holder in held]
    seen = look(session, key, cursor_ns, pids_of(session, key[0], cursor_ns), allocators)
    ranks = tuple(sorted(holder.process.rank for holder in held))
    stale = seen is not None and seen.given_back
    held = [] if stale else held
    reserved = sum(holder.reserved_bytes for holder in held)
    inside = [Row(UNALLOCATED, reserved - sum(holder.allocated_bytes for holder in held), _ALLOCATOR)] if held else []
    inside += allocated_rows(held)
    total = seen.total_bytes if seen is not None else capacity(engines, held, reserved)
    rows = (*device_rows(seen, total, reserved, read=bool(held)), *inside)
    return GpuLedger(
        host=key[0],
        index=key[1],
        name=gpu_name(session, key, cursor_ns),
        ranks=ranks,
        total_bytes=total,
        rows=rows,
        job_bytes=seen.job_bytes if seen is not None else None,
        reserved_bytes=reserved,
        allocated_bytes=sum(holder.allocated_bytes for holder in held),
        unexplained_largest=_largest(held),
        notes=(
            *((_GIVEN_BACK,) if stale else ()),
            *notes_of(engines, seen, held),
            *_not_read(session, key, cursor_ns, engines),
            *_taken_out(session, key, cursor_ns),
        ),
    )


def told_on(session: Session, cursor_ns: int, allocator: str | None = None) -> dict[tuple[str, int], Key]:
    """The GPU that each process (host, pid) says its engine is on, those with such an allocator or all."""
    engines = engines_until(session, cursor_ns)
    wanted = {(each.host, each.pid) for each in engines if allocator in (None, each.facts.get("allocator"))}
    on = ranks_and_hosts.engines(_until(session, "node", cursor_ns), engines) if wanted else []
    return {process: key for process, key in on if process in wanted}


def _taken_out(session: Session, key: Key, cursor_ns: int) -> tuple[str, ...]:
    """Where a living rank on this GPU tells no more of its allocator."""
    left = _until(session, "left", cursor_ns)
    if not left:
        return ()
    ends = Ends(left)
    tables = [session.sources["allocator"][place] for place, on in lies_on(session, cursor_ns).items() if on == key]
    told = {process_of(source) for source in tables if ends.told_until(source) is None}
    silent = sorted(one.rank for one in {*map(process_of, tables)} - told if one in living(session, cursor_ns))
    who = f"rank {silent[0]}" if len(silent) == 1 else f"{len(silent)} ranks"
    return (_TAKEN_OUT.format(who=who),) if silent else ()


def _not_read(session: Session, key: Key, cursor_ns: int, engines: Sequence[Event]) -> tuple[str, ...]:
    """Where a living rank has an allocator on this GPU that has no counters."""
    if all(engine.facts.get("allocator") != "pluggable" for engine in engines):
        return ()
    on = told_on(session, cursor_ns, "pluggable")
    alive = {(process.host, process.pid) for process in living(session, cursor_ns)} if on else set()
    return (_NOT_READ,) if any(one == key and process in alive for process, one in on.items()) else ()


_ALLOCATOR = "PyTorch's allocator, its last reading"


def allocated_rows(held: Sequence[Holder]) -> list[Row]:
    """What the allocators have given out, by category, over all ranks of a GPU."""
    rows: dict[str, Row] = {}
    for holder in held:
        for row in _of_one(holder.allocated_bytes, holder.inventory):
            before = rows.get(row.key)
            rows[row.key] = row if before is None else Row(row.key, before.bytes + row.bytes, row.basis, row.note)
    return [rows[key] for key in ALLOCATED if key in rows]


def _of_one(allocated: int, told: Inventory | None) -> list[Row]:
    if told is None or is_opaque(allocated, told):
        return [Row(UNATTRIBUTED, allocated, _ALLOCATOR)]
    rows = [
        Row(name, told.device.get(name, 0), told.gradients_basis if name == GRADIENTS else told.basis) for name in CATEGORIES
    ]
    left = allocated - sum(row.bytes for row in rows)
    cublas = min(told.cublas_bytes, max(0, left))
    unexplained = min(told.unclaimed_bytes, max(0, left - cublas))
    rows.append(Row(ACTIVATIONS, max(0, left - cublas - unexplained), "what is left of allocated"))
    rows.append(Row(CUBLAS, cublas, told.basis))
    rows.append(Row(UNEXPLAINED, unexplained, told.basis))
    if left < 0:
        note = "Less is allocated than the inventory counted: some of it was moved away or freed since."
        rows.append(Row(FREED, left, "what is left of allocated", note))
    return rows


def is_opaque(allocated: int, told: Inventory) -> bool:
    """Whether the allocator shows none of its blocks although it has some, and tensors were not counted by their size."""
    return allocated > 0 and not told.blocks_bytes and not _by_size(told)


def _by_size(told: Inventory) -> bool:
    return told.blocks_bytes is None and bool(told.device)


def _largest(held: Iterable[Holder]) -> tuple[int, ...]:
    sizes = [size for holder in held if holder.inventory is not None for size in holder.inventory.unclaimed_largest]
    return tuple(sorted(sizes, reverse=True)[:10])


def pids_of(session: Session, host: str, cursor_ns: int) -> set[int]:
    """The process ids of the job on a node: its ranks, and the launchers that were sampled."""
    tables = ("begins", "allocator")
    pids = {source.pid for name in tables for source in session.of_host(name, host)}
    for _, tick in ranks_and_hosts.last_ticks(session.of_host("processes", host), cursor_ns).values():
        pids.update(np.unique(tick["pid"]).tolist())
    return pids


def gpu_name(session: Session, key: Key, cursor_ns: int) -> str:
    """What NVML calls a GPU."""
    for event in reversed(_until(session, "node", cursor_ns)):
        for gpu in event.facts.get("gpus") or [] if event.host == key[0] else []:
            if gpu.get("index") == key[1]:
                return str(gpu.get("name") or "GPU")
    return "GPU"


def capacity(engines: Iterable[Event], held: Sequence[Holder], reserved: int) -> int:
    """What PyTorch says that a device has; where nobody says, what is held of it."""
    mine = {(holder.process.host, holder.process.pid) for holder in held}
    sizes: list[Any] = [
        device.get("total_bytes")
        for engine in engines
        if (engine.host, engine.pid) in mine
        for device in engine.facts.get("devices") or []
    ]
    return max([reserved, *(size for size in sizes if isinstance(size, int))])


def notes_of(engines: Iterable[Event], seen: Look | None, held: Sequence[Holder]) -> tuple[str, ...]:
    """What has to be said of a ledger as a whole."""
    found = []
    if held and seen is None:
        found.append(_NO_NVML)
    if held and seen is not None and seen.job_bytes is None:
        found.append(_HIDDEN_LATE if seen.before_bytes is None else _HIDDEN)
    if any(holder.inventory is None for holder in held):
        found.append(NO_INVENTORY)
    if any(h.inventory is not None and is_opaque(h.allocated_bytes, h.inventory) for h in held):
        found.append(_OPAQUE)
    if any(h.inventory is not None and _by_size(h.inventory) for h in held):
        found.append(_BY_SIZE)
    mine = {(holder.process.host, holder.process.pid) for holder in held}
    devices = [d for e in engines if (e.host, e.pid) in mine for d in e.facts.get("devices") or []]
    if any(str(d.get("uuid") or "").startswith("MIG-") or " MIG " in str(d.get("name") or "") for d in devices):
        found.append(_MIG)
    return tuple(found)
