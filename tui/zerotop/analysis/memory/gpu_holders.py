"""The ranks' allocators on each GPU at a cursor."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from zerotop.analysis.keys import GpuKey, ProcessKey
from zerotop.analysis.memory.kept_memory import KeptMemory, read_kept_memory
from zerotop.analysis.memory.tensor_inventory import TensorInventory, read_inventory
from zerotop.analysis.processes import ranks_and_hosts
from zerotop.analysis.processes.alive_ranks import RankProcess, find_alive_processes, identify_process
from zerotop.analysis.processes.memo import CursorMemo
from zerotop.analysis.processes.process_exits import ProcessExits
from zerotop.session.reader import Session, Source


@dataclass(frozen=True, slots=True)
class GpuHolder:
    """One rank's allocator on a GPU at a moment, and the inventory that applies."""

    process: RankProcess
    source: Source
    reserved_bytes: int
    allocated_bytes: int
    inventory: TensorInventory | None
    kept: KeptMemory | None = None  # None at a peak, which is within a step


def find_holders(
    session: Session, cursor_ns: int, gpu_keys: Collection[GpuKey] | None = None
) -> dict[GpuKey, list[GpuHolder]]:
    """Return the living ranks' allocators by GPU, of ``gpu_keys`` or of all GPUs."""
    alive = set(find_alive_processes(session, cursor_ns))
    exits = ProcessExits(session.events_named("left", cursor_ns))
    holders: dict[GpuKey, list[GpuHolder]] = {}
    for index, key in read_gpu_by_allocator(session, cursor_ns).items():
        source = session.sources["allocator"][index]
        if (gpu_keys is not None and key not in gpu_keys) or identify_process(source) not in alive:
            continue
        if source.count_until(cursor_ns) and exits.reported_until(source) is None:
            holders.setdefault(key, []).append(read_holder(session, source, cursor_ns))
    return holders


def read_holder(session: Session, source: Source, cursor_ns: int) -> GpuHolder:
    """Return an allocator at its last reading, with the inventory of that time; it must have been read once."""
    last = source.until(cursor_ns)[-1]
    process, allocated = identify_process(source), max(0, int(last["allocated_bytes"]))
    # A newer inventory would count other bytes.
    inventory = read_inventory(session, process, int(last["time_ns"]) + source.offset_ns)
    kept = read_kept_memory(source, cursor_ns)
    return GpuHolder(process, source, max(allocated, int(last["reserved_bytes"])), allocated, inventory, kept)


def read_gpu_by_allocator(session: Session, cursor_ns: int) -> dict[int, GpuKey]:
    """Return the GPU of each allocator table, by the table's index in ``session.sources["allocator"]``."""
    # A new table without records names no GPU yet, so the result must not be cached.
    tables, begun = session.sources["allocator"], _STARTED_TABLES.get(session, 0)
    while begun < len(tables) and len(tables[begun].array):
        begun += 1
    _STARTED_TABLES[session] = begun
    if begun < len(tables):
        return _compute_gpu_by_allocator(session, cursor_ns)
    return _GPU_BY_ALLOCATOR.value_at(session, cursor_ns, lambda: _compute_gpu_by_allocator(session, cursor_ns))


_STARTED_TABLES: WeakKeyDictionary[Session, int] = WeakKeyDictionary()  # how many tables, from the first on, have records
_GPU_BY_ALLOCATOR: CursorMemo[dict[int, GpuKey]] = CursorMemo(("allocator",))


def _compute_gpu_by_allocator(session: Session, cursor_ns: int) -> dict[int, GpuKey]:
    nodes, engines = (session.events_named(name, cursor_ns) for name in ("node", "engine"))
    return ranks_and_hosts.find_gpu_by_allocator(session, nodes, engines)


def find_engine_gpus(session: Session, cursor_ns: int, allocator: str | None = None) -> dict[ProcessKey, GpuKey]:
    """Return the GPU that each process names for its engine, or only those of processes with this ``allocator``."""
    nodes, engines = (session.events_named(name, cursor_ns) for name in ("node", "engine"))
    wanted = {(event.host, event.pid) for event in engines if allocator in (None, event.facts.get("allocator"))}
    located = ranks_and_hosts.locate_engines(nodes, engines) if wanted else []
    return {process: key for process, key in located if process in wanted}
