"""The rows of a ledger: what there is, what it is called, and one GPU's worth of it."""

from __future__ import annotations

from dataclasses import dataclass

from zerotop.analysis.memory.tensor_inventory import (
    BUFFERS,
    CATEGORIES,
    GRADIENTS,
    MASTER_WEIGHTS,
    OPTIMIZER_STATE,
    PARAMETERS,
)

FREE, DRIVER, OTHERS, BEFORE, REST = "free", "driver", "other_processes", "before_the_job", "rest_of_device"
JOB, OUTSIDE, UNALLOCATED = "this_job", "outside_pytorch", "reserved_unallocated"
ACTIVATIONS, CUBLAS, UNEXPLAINED, UNATTRIBUTED = "activations", "cublas_workspaces", "unexplained", "unattributed"
APART, FREED = "read_apart", "freed_since"

LABELS = {
    FREE: "free",
    DRIVER: "driver, and what NVML gives to no process",
    OTHERS: "other processes",
    BEFORE: "in use before the job: driver and others",
    REST: "rest of the device, not seen",
    JOB: "this job: its allocator is not read",
    OUTSIDE: "this job outside PyTorch: context, NCCL, cuBLAS",
    UNALLOCATED: "reserved but unallocated",
    PARAMETERS: "parameters",
    GRADIENTS: "gradients",
    MASTER_WEIGHTS: "master weights",
    OPTIMIZER_STATE: "optimizer state",
    BUFFERS: "DeepSpeed buffers",
    ACTIVATIONS: "activations and temporaries",
    CUBLAS: "cuBLAS workspaces, by their size",
    UNEXPLAINED: "unexplained",
    UNATTRIBUTED: "allocated, not looked into",
    APART: "held beyond what the device has",
    FREED: "counted then, freed since",
}
ALLOCATED = (*CATEGORIES, ACTIVATIONS, CUBLAS, UNEXPLAINED, UNATTRIBUTED, FREED)
CORRECTIONS = (APART, FREED)


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One line of a ledger."""

    key: str  # a key of LABELS
    bytes: int  # below zero only where the key is one of CORRECTIONS
    basis: str  # what it rests on, as a few words
    note: str = ""  # a sentence where there is something to say

    @property
    def label(self) -> str:
        """The row's name on a screen."""
        return LABELS[self.key]


@dataclass(frozen=True, slots=True)
class GpuLedger:
    """One GPU. The bytes of ``rows`` add up to ``total_bytes`` exactly."""

    host: str
    index: int  # NVML's
    name: str
    ranks: tuple[int, ...]  # whose allocators it holds
    total_bytes: int
    rows: tuple[LedgerRow, ...]
    job_bytes: int | None  # NVML's figure for the job's processes (see device_looks); None where it does not show them
    reserved_bytes: int  # PyTorch's, over the ranks
    allocated_bytes: int  # likewise: what the rows of ALLOCATED add up to
    unexplained_largest: tuple[int, ...]  # the largest blocks of that row when it was counted, largest first
    notes: tuple[str, ...]  # sentences about the ledger as a whole

    def sum_bytes(self, *keys: str) -> int:
        """What the rows of these keys add up to; 0 where there are none."""
        return sum(row.bytes for row in self.rows if row.key in keys)
