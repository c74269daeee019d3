"""Styles of a ledger's rows."""

from __future__ import annotations

from zerotop.analysis.memory import host_ledger as on_host
from zerotop.analysis.memory import ledger_rows as of_gpu
from zerotop.analysis.memory import tensor_inventory as of_tensors

# From the bottom of a bar to its top.
PART_STYLES = {
    of_tensors.PARAMETERS: "memory-parameters",
    of_tensors.FROZEN_PARAMETERS: "memory-master",
    of_tensors.QUANTIZED_PARAMETERS: "memory-master",
    of_tensors.UNSHARDED_PARAMETERS: "memory-buffers",
    of_tensors.GRADIENTS: "memory-gradients",
    of_tensors.GRADIENT_BUCKETS: "memory-buffers",
    of_tensors.MASTER_WEIGHTS: "memory-master",
    of_tensors.OPTIMIZER_STATE: "memory-optimizer",
    of_tensors.BUFFERS: "memory-buffers",
    of_gpu.CUBLAS: "memory-workspaces",
    of_gpu.ACTIVATIONS: "memory-activations",
    of_gpu.UNATTRIBUTED: "memory-allocated",
    of_gpu.UNEXPLAINED: "memory-unexplained",
    of_gpu.HELD: "memory-unexplained",
    of_gpu.GROWN: "memory-unexplained",
    of_gpu.UNALLOCATED: "memory-reserved",
    of_gpu.OTHER_STREAMS: "memory-reserved",
    of_gpu.PRIVATE: "memory-reserved",
    on_host.PINNED_SPARE: "memory-reserved",
    of_gpu.OUTSIDE: "memory-other",
    of_gpu.OTHER_RANKS: "memory-other",
    of_gpu.HOST: "memory-other",
    of_gpu.JOB: "memory-other",
    on_host.FILES: "memory-free",
    on_host.REST: "memory-other",
    of_gpu.OTHERS: "memory-others",
    of_gpu.BEFORE: "memory-others",
    of_gpu.DRIVER: "memory-others",
    of_gpu.REST: "memory-free",
    of_gpu.FREE: "memory-free",
}
NOT_JOB_KEYS = (of_gpu.OTHERS, of_gpu.BEFORE, of_gpu.DRIVER, of_gpu.REST, of_gpu.FREE)
"""Rows of a device that do not belong to the job."""
