"""A rank holds memory on the GPU of another rank: a context of CUDA, mostly because a file was loaded onto that GPU."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Process
from zerotop.analysis.code_line import CodeLine, read_line
from zerotop.analysis.formatting import MIB
from zerotop.analysis.memory.gpu_ledger import find_pids
from zerotop.analysis.memory.nvml_snapshot import read_device_memory
from zerotop_probe.recording import events

_KIND = FindingKind(
    name="context_elsewhere",
    severity=Severity.INFO,
    confidence=0.95,
    headline="{holders} {verb} {used_bytes:bytes} on GPU {gpu}, where rank {rank} trains",
    details=(
        "NVML shows {processes:count process} of the job with memory on GPU {gpu} that train on other GPUs"
        "[; only {line} loads a file without saying where to]."
    ),
    advice="Choose the GPU before anything else uses CUDA, and load files onto it, or onto the CPU.",
    fix='torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))',
)
_LOADING = _KIND.with_changes(
    advice="Load onto the CPU first: without map_location a file goes to the GPU that it was saved from.",
    fix='torch.load(..., map_location="cpu")',
)
_LEAST_BYTES = 100 * MIB
# Steps before the first check; then twice as many each time.
_FIRST_CHECK = 4


class _State:
    next_check = _FIRST_CHECK


def detect(recording: Evidence) -> Iterator[Annotation | None]:
    """Report at most once for each rank whose GPU it is."""
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
    memory = read_device_memory(recording.at.at(time_ns), key, find_pids(recording.at.at(time_ns), key[0]), allocators)
    if memory is None or sum(size for _, size in memory.by_other_ranks) < _LEAST_BYTES:
        return None
    process.reported.add(_KIND.name)
    ranks = {other.source.pid: other for other in recording.processes if other.host == process.host}
    holders = [ranks[pid] for pid, _ in memory.by_other_ranks if pid in ranks]
    names = [f"Rank {other.rank}" for other in holders] or ["Another process of the job"]
    line = next((found for other in holders if (found := _find_line(other, time_ns)) is not None), None)
    evidence = {
        "used_bytes": sum(size for _, size in memory.by_other_ranks),
        "processes": len(memory.by_other_ranks),
        "total_bytes": memory.total_bytes,
    }
    kind = _LOADING if line is not None else _KIND
    group = next(one for one in recording.groups if process in one.processes)
    return group.keep_saving_advice(kind, time_ns).at_steps(
        process,
        row,
        evidence,
        holders=names[0] if len(names) == 1 else f"{len(names)} other ranks",
        verb="holds" if len(names) == 1 else "hold",
        gpu=key[1],
        line=line.text if line is not None else None,
    )


def _find_line(process: Process, known_ns: int) -> CodeLine | None:
    """Return the only line that loads a file without saying onto which device, if the rank's probe has found it."""
    for event in process.events_of(events.Tensors):
        found = event.context_line if event.unix_ns <= known_ns else None
        if found is not None and (line := read_line(found)) is not None:
            return line
    return None
