"""The gradient buckets of DistributedDataParallel: a second copy of all gradients."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group
from zerotop.analysis.annotations.support.memory.phase_peaks import SettledPeaks, find_new_peaks
from zerotop.analysis.memory.tensor_inventory import BEFORE_UPDATE, GRADIENT_BUCKETS, GRADIENTS
from zerotop_probe.recording.events import Tensors

_KIND = FindingKind(
    name="gradient_buckets",
    severity=Severity.INFO,
    confidence=0.95,
    headline="DistributedDataParallel holds the gradients twice: {bucket_bytes:bytes} in its buckets",
    details=(
        "They come on top of {gradient_bytes:bytes} of gradients, and are {share:percent} of the peak of {peak_bytes:bytes}."
    ),
    advice="{bucket_advice}",
    fix="{bucket_fix}",
)
# The least share of the peak: freeing less would hardly be noticed.
_LEAST_SHARE = 0.05


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report once for each attempt of the job, when the optimizer's state is there."""
    for group in recording.groups:
        for peaks in find_new_peaks(group, _KIND.name):
            yield from _find_buckets(group, peaks)


def _find_buckets(group: Group, peaks: SettledPeaks) -> Iterator[Annotation]:
    tables = (event.device for event in group.lead.events_of(Tensors) if event.when == BEFORE_UPDATE)
    sizes = next(tables, None) or {}
    buckets, peak = sizes.get(GRADIENT_BUCKETS, 0), peaks.highest_bytes
    if buckets > _LEAST_SHARE * peak:
        evidence = {"bucket_bytes": buckets, "gradient_bytes": sizes.get(GRADIENTS, 0), "peak_bytes": peak}
        kind = group.keep_saving_advice(_KIND, int(peaks.steps["end_unix_ns"][-1]))
        yield kind.at_steps(group, peaks.steps, evidence, share=buckets / peak)
