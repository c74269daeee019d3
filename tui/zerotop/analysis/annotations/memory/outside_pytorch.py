"""The job holds more of its GPU outside PyTorch than CUDA's context, NCCL and cuBLAS take.

Read from NVML's figure for the process less what its allocator reserved at a moment when it held still.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity, of_steps
from zerotop.analysis.annotations.support.evidence import Facts, Process
from zerotop.analysis.annotations.support.thresholds import OUTSIDE_BYTES
from zerotop.analysis.formatting import plural, size
from zerotop.analysis.memory.gpu_ledger import pids_of
from zerotop.analysis.memory.nvml_snapshot import look

# Steps after which is looked for the first time; each next time after twice as many.
_FIRST = 4


@dataclass
class _Seen:
    """After how many steps is looked next; whether it was told."""

    next: int = _FIRST
    told: bool = False


def detect(facts: Facts) -> Iterator[Annotation | None]:
    """At most one finding for each rank."""
    for process in facts.processes:
        yield PAUSE
        seen = process.kept(_Seen)
        while not seen.told and len(process.steps) >= seen.next:
            found = _at(facts, process, seen.next)
            seen.next, seen.told = 2 * seen.next, found is not None
            if found is not None:
                yield found


def _at(facts: Facts, process: Process, count: int) -> Annotation | None:
    key, rows = process.gpu, process.steps[:count]
    if key is None:
        return None
    time_ns = int(rows["end_unix_ns"][-1])
    mine = [
        allocator
        for other in facts.on_gpu(key)
        if other.source.born_ns <= time_ns
        for allocator in facts.own("allocator", other.source)
    ]
    seen = look(facts.session, key, time_ns, pids_of(facts.session, key[0], time_ns), mine)
    if seen is None or seen.outside_bytes is None or not seen.settled:
        return None
    each = seen.outside_bytes / max(1, len(mine))
    if each < OUTSIDE_BYTES:
        return None
    return of_steps(
        rows[-1:],
        name="outside_pytorch",
        ranks=(process.rank,),
        severity=Severity.WARNING,
        confidence=0.8,
        sentence=(
            f"Rank {process.rank} holds {size(each)} of GPU {key[1]} outside PyTorch after {plural(count, 'step')}, where"
            f" CUDA's context, NCCL and cuBLAS took 1.3 to 2.2 GiB elsewhere: other libraries, or many communicators."
        ),
        advice="Set NCCL_BUFFSIZE lower or make fewer process groups; CUDA_MODULE_LOADING=LAZY loads only kernels in use.",
        evidence={"outside_bytes": each, "device_bytes": float(seen.total_bytes)},
    )
