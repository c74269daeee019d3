"""Memory of a GPU outside PyTorch: of a rank that trains on another GPU, or more than libraries usually take.

A rank holds memory on the GPU of another rank as a context of CUDA, mostly because a file was loaded onto that GPU. What it
holds on its own GPU is NVML's figure minus the allocator's reserved bytes, at a moment when neither changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zerotop.analysis.code_line import CodeLine, read_line
from zerotop.analysis.findings.support import Evidence, Finding, FindingKind, Process, SearchWindow, Severity, in_each_rank
from zerotop.analysis.findings.support.gpu_use import find_own_processes
from zerotop.analysis.formatting import GIB, MIB
from zerotop.analysis.memory.gpu_ledger import find_pids
from zerotop.analysis.memory.nvml_snapshot import DeviceMemory, read_device_memory
from zerotop.recording.samples import Rows
from zerotop_probe.recording import events

_ELSEWHERE = FindingKind(
    name="context_elsewhere",
    severity=Severity.INFO,
    confidence=0.95,
    headline="{holders} {verb} {used_bytes:bytes} on GPU {gpu}, where rank {rank} trains",
    details=(
        "NVML shows {processes:count process} of the job with memory on GPU {gpu} that train on other GPUs"
        "[; only {line} loads a file without saying where to]."
    ),
    advice="Choose the GPU before anything else uses CUDA, and load files onto it, or onto the CPU.",
    fix='import os; torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))',
)
_LOADING = _ELSEWHERE.with_changes(
    advice="Load onto the CPU first: without map_location a file goes to the GPU that it was saved from.",
    fix='map_location="cpu"',
)
_LEAST_BYTES = 100 * MIB
_OUTSIDE = FindingKind(
    name="outside_pytorch",
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
# Steps before each check.
_CHECKS = tuple(4 << doubled for doubled in range(32))


@in_each_rank(kinds=2)
def detect(window: SearchWindow[Process]) -> Iterator[Finding]:
    """Report each at most once for each rank whose GPU it is."""
    fresh = window.steps(window.subject.steps)
    for count in _CHECKS:
        if fresh.start < count <= fresh.stop:
            yield from _check_process(window.recording, window.subject, count)


def _check_process(recording: Evidence, process: Process, step_count: int) -> Iterator[Finding]:
    key, row = process.gpu_key, process.steps[step_count - 1 : step_count]
    if key is None:
        return
    time_ns = int(row["end_unix_ns"][0])
    allocators = [
        allocator
        for other in recording.processes_on_gpu(key)
        if other.source.created_ns <= time_ns
        for allocator in other.tables("allocator")
    ]
    at = recording.at.at(time_ns)
    memory = read_device_memory(at, key, find_pids(at, key[0]), allocators)
    if memory is None:
        return
    # Others of the job, such as an engine or a script that it starts, may have no GPU but this one.
    started = find_own_processes(at, key[0])
    held = {pid: size for pid, size in memory.by_other_ranks if pid not in started}
    if sum(held.values()) >= _LEAST_BYTES:
        yield _build_elsewhere(recording, process, row, memory, held)
    each = (memory.outside_bytes or 0) / max(1, len(allocators))
    if memory.is_exact and each >= OUTSIDE_BYTES:
        evidence = {"outside_bytes": each, "device_bytes": memory.total_bytes}
        yield _OUTSIDE.at_steps(process, row, evidence, gpu=key[1], steps=step_count)


def _build_elsewhere(
    recording: Evidence, process: Process, row: Rows, memory: DeviceMemory, held: Mapping[int, int]
) -> Finding:
    time_ns = int(row["end_unix_ns"][0])
    ranks = {other.source.pid: other for other in recording.processes if other.host == process.host}
    holders = [ranks[pid] for pid in held if pid in ranks]
    names = [f"Rank {other.rank}" for other in holders] or ["Another process of the job"]
    line = next((found for other in holders if (found := _find_line(other, time_ns)) is not None), None)
    evidence = {
        "used_bytes": sum(held.values()),
        "processes": len(held),
        "total_bytes": memory.total_bytes,
    }
    kind = _LOADING if line is not None else _ELSEWHERE
    group = next(one for one in recording.groups if process in one.processes)
    return group.keep_saving_advice(kind, time_ns).at_steps(
        process,
        row,
        evidence,
        holders=names[0] if len(names) == 1 else f"{len(names)} other ranks",
        verb="holds" if len(names) == 1 else "hold",
        gpu=(process.gpu_key or ("", -1))[1],
        line=line.text if line is not None else None,
    )


def _find_line(process: Process, known_ns: int) -> CodeLine | None:
    """Return the only line that loads a file without saying onto which device, if the rank's probe has found it."""
    for event in process.events_of(events.Tensors):
        found = event.context_line if event.unix_ns <= known_ns else None
        if found is not None and (line := read_line(found)) is not None:
            return line
    return None
