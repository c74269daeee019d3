"""A device is nearly full of memory that PyTorch holds and does not use even at its peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity, build_step_finding, find_first_run
from zerotop.analysis.annotations.support.evidence import Evidence, Process, Rows
from zerotop.analysis.annotations.support.thresholds import FRAGMENTED_SHARE, NEARLY_FULL_SHARE, PLATEAU_STEPS
from zerotop.analysis.formatting import format_bytes, format_percent


@dataclass
class _State:
    """How far a process's steps were read, and whether it was told."""

    steps_read: int = 0
    is_reported: bool = False


def detect(facts: Evidence) -> Iterator[Annotation | None]:
    """At most one finding for each rank: the first PLATEAU_STEPS steps in a row in which it is so."""
    for process in facts.processes:
        yield PAUSE
        seen, device = process.get_state(_State), process.device_bytes
        if seen.is_reported or not device or len(process.steps) == seen.steps_read:
            continue
        steps = process.steps[max(0, seen.steps_read - PLATEAU_STEPS + 1) :]
        seen.steps_read = len(process.steps)
        held, used = steps["reserved_peak_bytes"], steps["allocated_peak_bytes"]
        split = (used >= 0) & (held - used > FRAGMENTED_SHARE * held) & (held > NEARLY_FULL_SHARE * device)
        first = find_first_run(split, PLATEAU_STEPS)
        if first is not None:
            seen.is_reported = True
            yield _build_finding(process, steps[first : first + PLATEAU_STEPS], device)


def _build_finding(process: Process, rows: Rows, device: int) -> Annotation:
    held, used = int(rows["reserved_peak_bytes"].max()), int(rows["allocated_peak_bytes"].max())
    expandable = process.has_expandable_segments
    return build_step_finding(
        rows,
        name="fragmentation",
        ranks=(process.rank,),
        severity=Severity.WARNING,
        confidence=0.85,
        sentence=(
            f"Rank {process.rank}'s PyTorch holds {format_bytes(held)} of the device's {format_bytes(device)} and uses {format_bytes(used)} at its"
            f" peak: {format_percent(1 - used / held)} of what it holds is in pieces or from larger batches before; expandable"
            f" segments are {'on' if expandable else 'off'}."
        ),
        advice="Pad batches to one sequence length (Trainer: group_by_length=True), so that freed blocks fit again."
        if expandable
        else "Start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        evidence={"reserved_bytes": float(held), "allocated_bytes": float(used), "device_bytes": float(device)},
    )
