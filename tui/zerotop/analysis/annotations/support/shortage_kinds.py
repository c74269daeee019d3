"""The findings about a rank that failed because a DataLoader's worker, or the rank itself, ran short of something."""

from __future__ import annotations

from typing import Any

from zerotop.analysis.annotations.support.annotation import FindingKind, Severity
from zerotop.analysis.annotations.support.rank_process import AdvancingRecording
from zerotop.analysis.failures.shortages import Short, find_shortage
from zerotop.analysis.failures.tracebacks import Traceback
from zerotop_probe.recording import events

_SHARED_MEMORY = FindingKind(
    name="dead_rank",
    severity=Severity.ERROR,
    confidence=0.95,
    headline="/dev/shm[ of {shared_bytes:bytes}] is full: {who} found no space",
    details="{text} Batches go from DataLoader workers to their rank through /dev/shm.",
    advice="Give the container more: --shm-size, or --ipc=host. Fewer workers and a smaller prefetch_factor need less.",
    fix="docker run --shm-size=16g",
)
_KINDS = {
    Short.SHARED_MEMORY: _SHARED_MEMORY,
    Short.OPEN_FILES: _SHARED_MEMORY.with_changes(
        headline="Too many open files: {who} failed",
        details="{text} Each tensor that a DataLoader worker sends needs an open file.",
        advice='Raise the limit of open files, or call torch.multiprocessing.set_sharing_strategy("file_system").',
        fix="ulimit -n 65536",
    ),
    Short.SPACE: _SHARED_MEMORY.with_changes(
        headline="No space left[ on {folder}]: {who} failed",
        details="{text}",
        advice="Free space there, or write to another file system; TMPDIR moves temporary files.",
        fix="df -h[ {folder}]",
    ),
    Short.WORKER: _SHARED_MEMORY.with_changes(
        headline="{who}[ (PID {worker_pid})] was killed: {worker_signal}",
        details="{text}",
        advice="Look at the kernel's log: if host memory was short, use fewer workers or a smaller prefetch_factor.",
        fix="dmesg -T | grep -i kill",
    ),
}


def choose_shortage_kind(
    recording: AdvancingRecording, host: str, rank: int | None, traceback: Traceback | None
) -> tuple[FindingKind, dict[str, Any]] | None:
    """Return the kind for a shortage that an exception reports, and its values; None if it reports none."""
    shortage = find_shortage(traceback) if traceback is not None else None
    if shortage is None:
        return None
    of_rank = f" of rank {rank}" if rank is not None else ""
    worker, process = f"a DataLoader worker{of_rank}", f"rank {rank}" if rank is not None else "the job"
    who = worker if shortage.is_worker else process
    sizes = [event.shared_memory_bytes for event in recording.events_of(events.Node) if event.writer.host == host]
    return _KINDS[shortage.kind], {
        "who": who[0].upper() + who[1:] if shortage.kind is Short.WORKER else who,
        "folder": shortage.folder or None,
        "worker_pid": shortage.worker_pid,
        "worker_signal": shortage.signal,
        "shared_bytes": next(filter(None, reversed(sizes)), None) if shortage.kind is Short.SHARED_MEMORY else None,
    }
