"""The ranks' allocators on each GPU at a cursor."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from zerotop.analysis.keys import GpuKey, ProcessKey
from zerotop.analysis.memory.kept_memory import KeptMemory, read_kept_memory
from zerotop.analysis.memory.tensor_inventory import TensorInventory, read_inventory
from zerotop.analysis.processes import ranks_and_hosts
from zerotop.analysis.processes.alive_ranks import RankProcess, find_alive_processes, identify_process, read_events
from zerotop.analysis.processes.memo import CursorMemo
from zerotop.analysis.processes.process_exits import ProcessExits
from zerotop.session.reader import Session, Source
from zerotop_probe.recording.events import Engine, Left, Node, OutOfMemory, TrainingChanged
from zerotop_probe.recording.tables import END, PHASE_CODE

_TAIL_ROWS = 4096  # readings to look back through
# Memory after a step has changed by at least these bytes and this share: an output that is kept may vary.
_LEAST_CHANGE, _CHANGE_SHARE = 32 << 20, 0.02


@dataclass(frozen=True, slots=True)
class GpuHolder:
    """One rank's allocator on a GPU at a moment, and the inventory that applies."""

    process: RankProcess
    source: Source
    reserved_bytes: int
    allocated_bytes: int
    inventory: TensorInventory | None
    kept: KeptMemory | None = None  # None at a peak, which is within a step
    has_changed: bool = False  # memory after a step, or the training itself, since the inventory


def find_holders(
    session: Session, cursor_ns: int, gpu_keys: Collection[GpuKey] | None = None
) -> dict[GpuKey, list[GpuHolder]]:
    """Return the living ranks' allocators by GPU, of ``gpu_keys`` or of all GPUs."""
    alive = set(find_alive_processes(session, cursor_ns))
    exits = ProcessExits(session.events_of(Left, cursor_ns))
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
    time_ns, reserved = int(last["time_ns"]) + source.offset_ns, int(last["reserved_bytes"])
    failure = _find_failure(session, process, time_ns, cursor_ns)
    if failure is not None:
        allocated, reserved, time_ns = failure
    # A newer inventory would count other bytes.
    inventory = read_inventory(session, process, time_ns, at_failure=failure is not None)
    kept = read_kept_memory(source, cursor_ns) if failure is None else None
    has_changed = inventory is not None and _has_changed(session, process, source, inventory.counted_ns, cursor_ns)
    return GpuHolder(process, source, max(allocated, reserved), allocated, inventory, kept, has_changed)


def _find_failure(session: Session, process: RankProcess, since_ns: int, cursor_ns: int) -> tuple[int, int, int] | None:
    """Return allocated and reserved bytes, and the time, of an allocation that has failed since the last reading."""
    for event in reversed(read_events(session, OutOfMemory, process, cursor_ns)):
        allocated, reserved = event.allocated_bytes, event.reserved_bytes
        if event.unix_ns >= since_ns and allocated is not None and reserved is not None:
            return allocated, reserved, event.unix_ns
    return None


def _has_changed(session: Session, process: RankProcess, source: Source, counted_ns: int, cursor_ns: int) -> bool:
    """Return whether memory after a step, or the training, is another than when tensors were counted."""
    if any(event.unix_ns > counted_ns for event in read_events(session, TrainingChanged, process, cursor_ns)):
        return True
    rows = source.until(cursor_ns)[-_TAIL_ROWS:]
    ends = rows[(rows["edge"] == END) & (rows["phase"] == PHASE_CODE["step"])]
    before = ends[ends["time_ns"] + source.offset_ns <= counted_ns]
    if not len(before) and len(rows) == _TAIL_ROWS:
        known = source.until(counted_ns)[-_TAIL_ROWS:]
        before = known[(known["edge"] == END) & (known["phase"] == PHASE_CODE["step"])]
    if not len(before) or not len(ends):
        return False
    then, now = int(before["allocated_bytes"][-1]), int(ends["allocated_bytes"][-1])
    return abs(now - then) > max(_LEAST_CHANGE, _CHANGE_SHARE * then)


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
    nodes, engines = session.events_of(Node, cursor_ns), session.events_of(Engine, cursor_ns)
    return ranks_and_hosts.find_gpu_by_allocator(session, nodes, engines)


def find_engine_gpus(session: Session, cursor_ns: int, allocator: str | None = None) -> dict[ProcessKey, GpuKey]:
    """Return the GPU that each process names for its engine, or only those of processes with this ``allocator``."""
    nodes, engines = session.events_of(Node, cursor_ns), session.events_of(Engine, cursor_ns)
    wanted = {(event.writer.host, event.writer.pid) for event in engines if allocator in (None, event.allocator)}
    located = ranks_and_hosts.locate_engines(nodes, engines) if wanted else []
    return {process: key for process, key in located if process in wanted}
