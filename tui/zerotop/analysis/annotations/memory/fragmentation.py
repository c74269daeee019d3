"""A device is nearly full of memory that PyTorch holds and does not use even at its peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity, first_run, of_steps
from zerotop.analysis.annotations.support.evidence import Facts, Process, Rows
from zerotop.analysis.annotations.support.thresholds import FRAGMENTED_SHARE, PLATEAU_STEPS, SHORT_SHARE
from zerotop.analysis.formatting import percent, size


@dataclass
class _Seen:
    """How far a process's steps were read, and whether it was told."""

    steps: int = 0
    told: bool = False


def detect(facts: Facts) -> Iterator[Annotation | None]:
    """At most one finding for each rank: the first PLATEAU_STEPS steps in a row in which it is so."""
    for process in facts.processes:
        yield PAUSE
        seen, device = process.kept(_Seen), process.device_bytes
        if seen.told or not device or len(process.steps) == seen.steps:
            continue
        steps = process.steps[max(0, seen.steps - PLATEAU_STEPS + 1) :]
        seen.steps = len(process.steps)
        held, used = steps["reserved_peak_bytes"], steps["allocated_peak_bytes"]
        split = (used >= 0) & (held - used > FRAGMENTED_SHARE * held) & (held > SHORT_SHARE * device)
        first = first_run(split, PLATEAU_STEPS)
        if first is not None:
            seen.told = True
            yield _annotation(process, steps[first : first + PLATEAU_STEPS], device)


def _annotation(process: Process, rows: Rows, device: int) -> Annotation:
    held, used = int(rows["reserved_peak_bytes"].max()), int(rows["allocated_peak_bytes"].max())
    expandable = process.expandable
    return of_steps(
        rows,
        name="fragmentation",
        ranks=(process.rank,),
        severity=Severity.WARNING,
        confidence=0.85,
        sentence=(
            f"Rank {process.rank}'s PyTorch holds {size(held)} of the device's {size(device)} and uses {size(used)} at its"
            f" peak: {percent(1 - used / held)} of what it holds is in pieces or from larger batches before; expandable"
            f" segments are {'on' if expandable else 'off'}."
        ),
        advice="Pad batches to one sequence length (Trainer: group_by_length=True), so that freed blocks fit again."
        if expandable
        else "Start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        evidence={"reserved_bytes": float(held), "allocated_bytes": float(used), "device_bytes": float(device)},
    )
