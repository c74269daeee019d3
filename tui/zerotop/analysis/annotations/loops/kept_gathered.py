"""FSDP keeps whole parameters from the forward to the backward, because freeing them in between is switched off."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.block_shapes import find_first_backward
from zerotop.analysis.annotations.support.evidence import Evidence, Group
from zerotop.analysis.annotations.support.phase_peaks import SettledPeaks, find_settled_peaks
from zerotop.analysis.memory.tensor_inventory import UNSHARDED_PARAMETERS

_KIND = FindingKind(
    name="kept_gathered",
    severity=Severity.INFO,
    confidence=0.99,
    headline="FSDP keeps {gathered_bytes:bytes} of gathered parameters until the backward",
    details="That is {share:percent} of the peak of {peak_bytes:bytes}: freeing them after the forward is switched off.",
    advice="Freed, they are gathered once more for the backward. Keep them while memory is enough.",
    fix="{reshard}",
)
_SETTINGS = {
    "FSDP": "sharding_strategy=ShardingStrategy.FULL_SHARD",
    "FSDP2": "fully_shard(layer, reshard_after_forward=True)",
}
# Of the peak: below it the freed memory would not be noticed.
_LEAST_SHARE = 0.05


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report once for each attempt of the job, when the optimizer's state is there."""
    for group in recording.groups:
        peaks = find_settled_peaks(group.lead) if _KIND.name not in group.reported else None
        if peaks is not None:
            group.reported.add(_KIND.name)
            yield from _find_gathered(group, peaks)


def _find_gathered(group: Group, peaks: SettledPeaks) -> Iterator[Annotation]:
    engine = group.lead.engine
    sharding, parallelism = engine.get("sharding") or {}, engine.get("parallelism")
    sizes = find_first_backward(group.lead).get("device") or {}
    gathered = sizes.get(UNSHARDED_PARAMETERS, 0)
    share = gathered / peaks.highest_bytes
    if not sharding.get("reshards", True) and parallelism in _SETTINGS and share > _LEAST_SHARE:
        evidence = {"gathered_bytes": gathered, "peak_bytes": peaks.highest_bytes}
        yield _KIND.at_steps(group, peaks.steps, evidence, share=share, reshard=_SETTINGS[parallelism])
