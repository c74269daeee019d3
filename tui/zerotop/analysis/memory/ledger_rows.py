"""The rows of a GPU's ledger: their keys and labels, and the ledger that holds them."""

from __future__ import annotations

from dataclasses import dataclass

from zerotop.analysis.formatting import BINARY, ByteUnits, format_bytes
from zerotop.analysis.memory.tensor_inventory import CATEGORIES, CATEGORY_LABELS

FREE, DRIVER, OTHERS, BEFORE, REST = "free", "driver", "other_processes", "before_the_job", "rest_of_device"
JOB, OUTSIDE, UNALLOCATED = "this_job", "outside_pytorch", "reserved_unallocated"
ACTIVATIONS, CUBLAS, UNEXPLAINED, UNATTRIBUTED = "activations", "cublas_workspaces", "unexplained", "unattributed"
HELD, GROWN, OTHER_STREAMS, PRIVATE, OTHER_RANKS = "held", "grown", "other_streams", "private_pools", "other_ranks"
HOST = "host_memory"
APART, FREED = "read_apart", "freed_since"

LABELS = {
    FREE: "free",
    DRIVER: "driver",
    OTHERS: "other processes",
    BEFORE: "in use before the job",
    REST: "rest of the device",
    JOB: "allocator not read",
    HOST: "host memory of this job",
    OUTSIDE: "outside PyTorch",
    UNALLOCATED: "reserved, unallocated",
    **CATEGORY_LABELS,
    ACTIVATIONS: "activations, temporaries",
    HELD: "kept by the script",
    GROWN: "grown since counted",
    OTHER_STREAMS: "cached for other streams",
    PRIVATE: "free in private pools",
    OTHER_RANKS: "contexts of other ranks",
    CUBLAS: "cuBLAS workspaces",
    UNEXPLAINED: "unexplained",
    UNATTRIBUTED: "allocated, not divided",
    APART: "beyond the device's size",
    FREED: "freed since counted",
}
_KEPT, _INITIAL = "activations, still alive", "other tensors"
ALLOCATED = (*CATEGORIES, HELD, GROWN, ACTIVATIONS, CUBLAS, UNEXPLAINED, UNATTRIBUTED, FREED)
CORRECTIONS = (APART, FREED)


@dataclass(frozen=True, slots=True)
class LedgerRow:
    key: str  # a key of LABELS
    bytes: int  # below zero only where the key is one of CORRECTIONS
    basis: str  # the source of the figure, in a few words
    note: str = ""  # a sentence about the figure, or ""
    is_kept: bool = False  # of ACTIVATIONS: no phase runs, these bytes outlived the step
    growth_bytes: int = 0  # of GROWN, or of ACTIVATIONS: by which they grow in each step
    since_step: int | None = None  # of GROWN: after which it was not there
    is_initial: bool = False  # of ACTIVATIONS: no step has begun
    is_bound: bool = False  # of OUTSIDE: it may be much less
    is_outdated: bool = False  # of a category: memory has changed since it was counted

    def describe(self, units: ByteUnits = BINARY) -> str:
        """Return the row's name for readers: ``activations, +24.0 MiB/step``."""
        name = _INITIAL if self.is_initial else _KEPT if self.is_kept else LABELS[self.key]
        if not self.growth_bytes:
            return name if self.since_step is None else f"grown since step {self.since_step}"
        name = name.partition(",")[0] if self.since_step is None else "grown"
        return f"{name}, +{format_bytes(self.growth_bytes, units)}/step"


@dataclass(frozen=True, slots=True)
class GpuLedger:
    """One GPU. The bytes of ``rows`` add up to ``total_bytes`` exactly."""

    host: str
    index: int  # NVML's
    name: str
    ranks: tuple[int, ...]  # with an allocator on it
    total_bytes: int
    rows: tuple[LedgerRow, ...]
    job_bytes: int | None  # NVML's figure for the job's processes (see nvml_snapshot); None where it does not show them
    reserved_bytes: int  # PyTorch's, over the ranks
    allocated_bytes: int  # likewise; the sum of the rows of ALLOCATED
    unexplained_largest: tuple[int, ...]  # largest blocks of UNEXPLAINED when counted, largest first
    notes: tuple[str, ...]  # sentences about the ledger as a whole
    is_unified: bool = False  # its memory is the host's: rows of host memory are in the same pool

    def sum_bytes(self, *keys: str) -> int:
        """Return the sum of the rows with these keys."""
        return sum(row.bytes for row in self.rows if row.key in keys)
