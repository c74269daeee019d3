"""The job holds more of its GPU outside PyTorch than CUDA's context, NCCL and cuBLAS take.

This is NVML's figure for the process minus the allocator's reserved bytes, at a moment when neither changed.
"""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Process
from zerotop.analysis.formatting import GIB
from zerotop.analysis.memory.gpu_ledger import find_pids
from zerotop.analysis.memory.nvml_snapshot import read_device_memory

_KIND = FindingKind(
    name="outside_pytorch",
    severity=Severity.WARNING,
    confidence=0.8,
    gpu_bytes="outside_bytes",
    headline="Rank {rank} holds {outside_bytes:bytes} of GPU {gpu} outside PyTorch",
    details=(
        "Seen after {steps:count step}. In other jobs CUDA's context, NCCL and cuBLAS take"
        f" {{{int(1.3 * GIB)}:bytes}} to {{{int(2.2 * GIB)}:bytes}}: the rest belongs to other libraries, or to many"
        " communicators."
    ),
    advice="Create fewer process groups, and load only the kernels in use.",
    fix="export CUDA_MODULE_LOADING=LAZY",
)
# About twice the most that context, NCCL and cuBLAS took on the recorded GPUs.
OUTSIDE_BYTES = 4 * GIB
# Steps before the first check; then twice as many each time.
_FIRST_CHECK = 4


class _State:
    next_check = _FIRST_CHECK


def detect(recording: Evidence) -> Iterator[Annotation | None]:
    """Report at most once for each rank."""
    for process in recording.processes:
        state = process.get_state(_State)
        while _KIND.name not in process.reported and len(process.steps) >= state.next_check:
            yield _check_process(recording, process, state.next_check)
            state.next_check *= 2


def _check_process(recording: Evidence, process: Process, step_count: int) -> Annotation | None:
    key, row = process.gpu_key, process.steps[step_count - 1 : step_count]
    if key is None:
        return None
    time_ns = int(row["end_unix_ns"][0])
    allocators = [
        allocator
        for other in recording.processes_on_gpu(key)
        if other.source.created_ns <= time_ns
        for allocator in other.tables("allocator")
    ]
    pids = find_pids(recording.at.at(time_ns), key[0])
    memory = read_device_memory(recording.at.at(time_ns), key, pids, allocators)
    if memory is None or memory.outside_bytes is None or not memory.is_exact:
        return None
    each = memory.outside_bytes / max(1, len(allocators))
    if each < OUTSIDE_BYTES:
        return None
    process.reported.add(_KIND.name)
    evidence = {"outside_bytes": each, "device_bytes": memory.total_bytes}
    return _KIND.at_steps(process, row, evidence, gpu=key[1], steps=step_count)
