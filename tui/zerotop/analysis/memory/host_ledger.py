"""The use of a rank's host memory at a cursor: rows that add up to the kernel's resident set size (RSS).

::

    resident = parameters + gradients + master weights + optimizer state + buffers
               + the pinned allocator's memory beyond its tensors + pages of files + rest

PyTorch's pinned allocator rounds requests up to powers of two and keeps freed blocks for reuse. Pages of files are libraries
and mapped data; the kernel drops them when memory is short. The rest is Python, batches, shared memory. Tensors that are
counted but not resident (never written to, swapped out, or of a mapped file) make a row below zero. DataLoader workers are
processes of their own: their private memory is not in this sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zerotop.analysis.engine import keep_latest
from zerotop.analysis.memory.tensor_inventory import (
    CATEGORY_LABELS,
    GRADIENTS,
    MASTER_WEIGHTS,
    NO_INVENTORY,
    OPTIMIZER_STATE,
    TensorInventory,
    read_inventory,
)
from zerotop.recording.keys import RankProcess
from zerotop.recording.moments.at import At
from zerotop.recording.moments.process_exits import find_alive_processes
from zerotop_probe.recording.events import Engine

PINNED_SPARE, FILES, REST, NOT_RESIDENT, WORKERS = "pinned_spare", "files", "rest", "not_resident", "workers"

LABELS = {
    **CATEGORY_LABELS,
    PINNED_SPARE: "pinned beyond tensors",
    FILES: "pages of files",
    REST: "Python, batches, other",
    NOT_RESIDENT: "counted but not resident",
    WORKERS: "DataLoader workers, private",
}

WORKERS_BASIS = "not in the sum; estimated from a sample of pages"
_KERNEL = "the kernel's figure less the rows above"
_SIZES = ("rss_bytes", "shared_bytes", "pinned_bytes", "locked_bytes", "swap_bytes", "held_bytes", "loader_private_bytes")


@dataclass(frozen=True, slots=True)
class HostRow:
    """One row of a rank's host memory."""

    key: str  # a key of LABELS
    bytes: int  # below zero only for NOT_RESIDENT
    pinned_bytes: int  # the part in pinned tensors
    per_parameter: float | None  # bytes for each parameter that this rank updates; None where that has no meaning
    basis: str  # the source of the figure, in a few words

    @property
    def label(self) -> str:
        """The row's name for readers."""
        return LABELS[self.key]


@dataclass(frozen=True, slots=True)
class PinnedMemory:
    """PyTorch's allocator for pinned memory at the inventory. Its ``active_bytes`` may exceed what it holds: not used."""

    held_bytes: int  # from the driver: in use and kept for reuse
    tensors_bytes: int  # of the pinned tensors that the inventory counts: not of batches
    basis: str  # of which moment

    def describe(self, format_size: Callable[[int], str], unit: str) -> str:
        """Return a sentence with the figures."""
        held, tensors = format_size(self.held_bytes).strip(), format_size(self.tensors_bytes).strip()
        return (
            f"PyTorch's pinned allocator held {held} {unit}, the pinned tensors of the rows above {tensors}: {self.basis}."
        )


@dataclass(frozen=True, slots=True)
class HostLedger:
    """One rank process. The bytes of ``rows`` add up to ``resident_bytes`` exactly."""

    rank: int
    host: str
    pid: int
    resident_bytes: int
    worker_bytes: int | None  # private to the rank's DataLoader workers, beyond resident_bytes; None if unknown or none
    shared_bytes: int  # the part in shared memory, pinned buffers among it
    locked_bytes: int  # pinned or locked, as the kernel counts it
    swap_bytes: int
    updated_parameters: int | None  # of which this rank keeps master weights and moments
    rows: tuple[HostRow, ...]
    pinned: PinnedMemory | None  # None where this torch does not count it, and without CUDA
    notes: tuple[str, ...]  # sentences about the ledger as a whole

    def sum_bytes(self, *keys: str) -> int:
        """Return the sum of the rows with these keys."""
        return sum(row.bytes for row in self.rows if row.key in keys)


def read_host_ledgers(at: At) -> tuple[HostLedger, ...]:
    """Return the ledgers of all living ranks that were sampled, in order of rank."""
    ledgers = (read_host_ledger(at, process) for process in find_alive_processes(at))
    return tuple(ledger for ledger in ledgers if ledger is not None)


def read_host_ledger(at: At, process: RankProcess) -> HostLedger | None:
    """Return one rank's ledger; None if it was not sampled."""
    row = at.records("processes", process.host, "pid", process.pid).read_last(at.cursor_ns)
    if row is None:
        return None
    sample = {name: max(0, int(row[name])) if name in row.dtype.names else 0 for name in _SIZES}
    inventory = read_inventory(at, process)
    updated = _count_updated_parameters(at, process)
    pinned = _measure_pinned(inventory) if inventory is not None else None
    return HostLedger(
        rank=process.rank,
        host=process.host,
        pid=process.pid,
        resident_bytes=sample["rss_bytes"],
        worker_bytes=sample["loader_private_bytes"] or None,
        shared_bytes=sample["shared_bytes"],
        locked_bytes=sample["pinned_bytes"] + sample["locked_bytes"],
        swap_bytes=sample["swap_bytes"],
        updated_parameters=updated,
        rows=tuple(_build_rows(sample["rss_bytes"], sample["held_bytes"], inventory, pinned, updated)),
        pinned=pinned,
        notes=tuple(filter(None, [_describe_inventory(inventory)])),
    )


def _describe_inventory(inventory: TensorInventory | None) -> str:
    return NO_INVENTORY if inventory is None else inventory.describe_optimizer_states(on_device=False)


def _build_rows(
    resident: int, held: int, inventory: TensorInventory | None, pinned: PinnedMemory | None, updated: int | None
) -> list[HostRow]:
    rows = [_build_row(name, inventory, updated) for name in inventory.categories] if inventory is not None else []
    if pinned is not None:
        spare = max(0, pinned.held_bytes - pinned.tensors_bytes)
        rows.append(HostRow(PINNED_SPARE, spare, spare, None, "PyTorch's pinned allocator less the pinned tensors"))
    if held:
        rows.append(HostRow(FILES, max(0, resident - held), 0, None, "given back when needed"))
    left = resident - sum(row.bytes for row in rows)
    rows.append(HostRow(REST, max(0, left), 0, None, _KERNEL))
    if left < 0:
        rows.append(HostRow(NOT_RESIDENT, left, 0, None, _KERNEL))
    return rows


def _build_row(name: str, inventory: TensorInventory, updated: int | None) -> HostRow:
    size = inventory.host.get(name, 0)
    per = size / updated if updated and name in (MASTER_WEIGHTS, OPTIMIZER_STATE, GRADIENTS) else None
    basis = inventory.gradients_basis if name == GRADIENTS else inventory.basis
    return HostRow(name, size, inventory.host_pinned.get(name, 0), per, basis)


def _measure_pinned(inventory: TensorInventory) -> PinnedMemory | None:
    if inventory.pinned_allocator is None or "allocated_bytes" not in inventory.pinned_allocator:
        return None
    held = inventory.pinned_allocator["allocated_bytes"]
    return PinnedMemory(held, sum(inventory.host_pinned.values()), inventory.basis)


def _count_updated_parameters(at: At, process: RankProcess) -> int | None:
    """Return how many parameters a rank's optimizers update: from stage 1 on each rank has a share of them."""
    total = 0
    for engine in keep_latest(at.process_events(Engine, process)):
        count, ranks = engine.trainable_parameters, engine.data_parallel or 1
        if count is None:
            return None
        if engine.optimizer:
            total += -(-count // ranks) if (engine.zero_stage or 0) >= 1 else count
    return total or None
