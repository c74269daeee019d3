"""The job holds more of its GPU outside PyTorch than CUDA's context, NCCL and cuBLAS take.

Read from NVML's figure for the process less what its allocator reserved at a moment when it held still.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity, build_step_finding
from zerotop.analysis.annotations.support.evidence import Evidence, Process
from zerotop.analysis.annotations.support.thresholds import OUTSIDE_BYTES
from zerotop.analysis.formatting import format_bytes, format_count
from zerotop.analysis.memory.gpu_holders import find_pids
from zerotop.analysis.memory.nvml_snapshot import read_device_memory

# Steps after which is looked for the first time; each next time after twice as many.
_FIRST_CHECK = 4


@dataclass
class _State:
    """After how many steps is looked next; whether it was told."""

    next_check: int = _FIRST_CHECK
    is_reported: bool = False


def detect(facts: Evidence) -> Iterator[Annotation | None]:
    """At most one finding for each rank."""
    for process in facts.processes:
        yield PAUSE
        seen = process.get_state(_State)
        while not seen.is_reported and len(process.steps) >= seen.next_check:
            found = _build_finding(facts, process, seen.next_check)
            seen.next_check, seen.is_reported = 2 * seen.next_check, found is not None
            if found is not None:
                yield found


def _build_finding(facts: Evidence, process: Process, step_count: int) -> Annotation | None:
    key, rows = process.gpu_key, process.steps[:step_count]
    if key is None:
        return None
    time_ns = int(rows["end_unix_ns"][-1])
    mine = [
        allocator
        for other in facts.processes_on_gpu(key)
        if other.source.created_ns <= time_ns
        for allocator in facts.process_sources("allocator", other.source)
    ]
    seen = read_device_memory(facts.session, key, time_ns, find_pids(facts.session, key[0], time_ns), mine)
    if seen is None or seen.outside_bytes is None or not seen.is_exact:
        return None
    each = seen.outside_bytes / max(1, len(mine))
    if each < OUTSIDE_BYTES:
        return None
    return build_step_finding(
        rows[-1:],
        name="outside_pytorch",
        ranks=(process.rank,),
        severity=Severity.WARNING,
        confidence=0.8,
        sentence=(
            f"Rank {process.rank} holds {format_bytes(each)} of GPU {key[1]} outside PyTorch after {format_count(step_count, 'step')}, where"
            f" CUDA's context, NCCL and cuBLAS took 1.3 to 2.2 GiB elsewhere: other libraries, or many communicators."
        ),
        advice="Set NCCL_BUFFSIZE lower or make fewer process groups; CUDA_MODULE_LOADING=LAZY loads only kernels in use.",
        evidence={"outside_bytes": each, "device_bytes": float(seen.total_bytes)},
    )
