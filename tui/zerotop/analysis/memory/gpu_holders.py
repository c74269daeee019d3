"""The ranks' allocators on each GPU at a cursor."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from zerotop.analysis.memory.kept_memory import Growth, KeptMemory, measure_growth, read_kept_memory, read_level
from zerotop.analysis.memory.tensor_inventory import TensorInventory, read_inventory
from zerotop.recording.keys import GpuKey, ProcessKey, RankProcess, identify_process
from zerotop.recording.moments.at import At
from zerotop.recording.moments.devices import locate_allocators, read_devices
from zerotop.recording.moments.process_exits import ProcessExits, find_alive_processes
from zerotop.recording.reader import Source
from zerotop_probe.recording.events import Engine, Left, OutOfMemory, TrainingChanged
from zerotop_probe.recording.tables import BOUNDARY, PHASE_CODE

_TAIL_SPANS = 256  # to look back through for the end of a step


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
    growth: Growth | None = None  # of memory after a step, beyond the inventory
    unread_since: int | None = None  # the step after which memory was last read, if others have ended since


def find_holders(at: At, gpu_keys: Collection[GpuKey] | None = None) -> dict[GpuKey, list[GpuHolder]]:
    """Return the living ranks' allocators by GPU, of ``gpu_keys`` or of all GPUs."""
    alive = set(find_alive_processes(at))
    exits = ProcessExits(at.events_of(Left))
    holders: dict[GpuKey, list[GpuHolder]] = {}
    for source, key in locate_allocators(at).items():
        if (gpu_keys is not None and key not in gpu_keys) or identify_process(source) not in alive:
            continue
        if source.count_until(at.cursor_ns) and exits.reported_until(source) is None:
            holders.setdefault(key, []).append(read_holder(at, source))
    return holders


def read_holder(at: At, source: Source) -> GpuHolder:
    """Return an allocator at its last reading, with the inventory of that time; it must have been read once."""
    last = source.until(at.cursor_ns)[-1]
    process, allocated = identify_process(source), max(0, int(last["allocated_bytes"]))
    time_ns, reserved = int(last["time_ns"]) + source.offset_ns, int(last["reserved_bytes"])
    failure = find_failed_allocation(at, process, time_ns)
    if failure is not None:
        allocated, reserved, time_ns = failure
    # A newer inventory would count other bytes.
    inventory = read_inventory(at.at(time_ns), process, at_failure=failure is not None)
    kept = read_kept_memory(source, at.cursor_ns) if failure is None else None
    has_changed = inventory is not None and _has_changed(at, process, source, inventory.counted_ns)
    return GpuHolder(
        process,
        source,
        max(allocated, reserved),
        allocated,
        inventory,
        kept,
        has_changed,
        find_growth(source, time_ns, inventory),
        _find_unread(at, process, source, time_ns),
    )


def _find_unread(at: At, process: RankProcess, source: Source, unix_ns: int) -> int | None:
    """Return the step after which memory was last read; None if no later step has ended by that time."""
    spans, level = at.find_table("spans", process), read_level(source, unix_ns)
    if spans is None or level is None:
        return None
    rows = spans.until(unix_ns)[-_TAIL_SPANS:]
    ended = rows["step"][(rows["phase"] == PHASE_CODE["step"]) & (rows["flags"] & BOUNDARY != 0)]
    return level.step if len(ended) and int(ended[-1]) > level.step else None


def find_growth(source: Source, unix_ns: int, inventory: TensorInventory | None) -> Growth | None:
    """Return how much allocated memory has grown since the tensors were counted, at a moment."""
    if inventory is None or inventory.growth is None:
        return None
    return measure_growth(source, unix_ns, inventory.growth)


def find_failed_allocation(at: At, process: RankProcess, since_ns: int) -> tuple[int, int, int] | None:
    """Return allocated and reserved bytes, and the time, of an allocation that has failed since the last reading."""
    for event in reversed(at.process_events(OutOfMemory, process)):
        allocated, reserved = event.allocated_bytes, event.reserved_bytes
        if event.unix_ns >= since_ns and allocated is not None and reserved is not None:
            return allocated, reserved, event.unix_ns
    return None


def _has_changed(at: At, process: RankProcess, source: Source, counted_ns: int) -> bool:
    """Return whether memory after a step, or the training, is another than when tensors were counted."""
    if any(event.unix_ns > counted_ns for event in at.process_events(TrainingChanged, process)):
        return True
    then, now = read_level(source, counted_ns), read_level(source, at.cursor_ns)
    return then is not None and now is not None and now.has_changed(then)


def find_engine_gpus(at: At, allocator: str | None = None) -> dict[ProcessKey, GpuKey]:
    """Return the GPU that each process names for its engine, or only those of engines with this ``allocator``."""
    devices = read_devices(at)
    return {
        engine.process_key: devices.find_gpu(engine.writer.host, engine.writer.pid, device.ordinal or 0)
        for engine in at.events_of(Engine)
        if allocator in (None, engine.allocator)
        for device in engine.devices or []
    }
