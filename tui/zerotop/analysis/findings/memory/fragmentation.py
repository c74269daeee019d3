"""A device is nearly full of memory that PyTorch has reserved but does not use, even at its peak."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.findings.support import Finding, FindingKind, Process, SearchWindow, in_each_rank
from zerotop.analysis.findings.support.steps.runs import find_first_run
from zerotop.analysis.findings.support.thresholds import FRAGMENTED_SHARE, PLATEAU_STEPS
from zerotop.recording.samples import Rows

_KIND = FindingKind(
    name="fragmentation",
    confidence=0.85,
    gpu_bytes="reserved_bytes - allocated_bytes",
    headline="{unused:percent} of the memory that PyTorch reserves is unused even at the peak",
    details=(
        "Rank {rank} reserves {reserved_bytes:bytes} of {device_bytes:bytes} and allocates"
        " {allocated_bytes:bytes} at its peak: the rest is fragmented, or left from larger batches. Expandable segments are"
        " off."
    ),
    advice="Start with expandable segments.",
    fix="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
)
_EXPANDABLE = _KIND.with_changes(
    details=_KIND.details.replace("are off", "are on"),
    advice="Pad batches to one size, so that freed blocks fit again.",
    fix="",
)
# Worth a finding: this reserved share of the device.
NEARLY_FULL_SHARE = 0.80


@in_each_rank()
def detect(window: SearchWindow[Process]) -> Iterator[Finding]:
    """Report at most once for each rank: the first PLATEAU_STEPS steps in a row that show it."""
    process, device = window.subject, window.subject.device_bytes
    if not device:
        return
    steps = process.phased_steps[window.steps(process.phased_steps, PLATEAU_STEPS - 1)]
    held, used = steps["reserved_peak_bytes"], steps["allocated_peak_bytes"]
    is_split = (used >= 0) & (held - used > FRAGMENTED_SHARE * held) & (held > NEARLY_FULL_SHARE * device)
    first = find_first_run(is_split, PLATEAU_STEPS)
    if first is not None:
        yield _build_finding(process, steps[first : first + PLATEAU_STEPS], device)


def _build_finding(process: Process, rows: Rows, device: int) -> Finding:
    held, used = int(rows["reserved_peak_bytes"].max()), int(rows["allocated_peak_bytes"].max())
    evidence = {"reserved_bytes": held, "allocated_bytes": used, "device_bytes": device}
    kind = _EXPANDABLE if process.has_expandable_segments else _KIND
    return kind.at_steps(process, rows, evidence, unused=1 - used / held)
