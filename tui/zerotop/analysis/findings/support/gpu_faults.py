"""Hardware faults of GPUs as detectors need them: the processes of an attempt, and findings that a fault explains."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zerotop.analysis.findings.support.evidence import Evidence, Group, Process
from zerotop.analysis.findings.support.finding import FindingKind
from zerotop.analysis.hardware.gpu_faults import explain_by_fault, find_users


def find_rank_processes(recording: Evidence, host: str, gpus: Collection[int], time_ns: int) -> tuple[list[Process], bool]:
    """Return the processes of the latest attempt at a time that use a GPU, and whether it may be one of the job's."""
    begun = [group for group in recording.groups if group.lead.source.created_ns <= time_ns]
    by_key = {process.process: process for process in begun[-1].processes} if begun else {}
    users = find_users(recording.at, by_key, host, gpus, time_ns)
    return [by_key[process] for process in users.processes], users.is_ours


def change_by_fault(
    recording: Evidence, group: Group, kind: FindingKind, ranks: Sequence[int], window: tuple[int, int]
) -> FindingKind:
    """Return a kind of finding about ranks that tells the fault of a GPU that explains it; the hardware's gives the advice.

    ``window``: begin of what is explained, and when it became known.
    """
    fault = explain_by_fault(recording.at, [process.process for process in group.processes], ranks, *window)
    return kind.with_changes(**fault.change_texts(kind.details)) if fault is not None else kind
