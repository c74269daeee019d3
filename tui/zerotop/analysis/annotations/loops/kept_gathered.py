"""FSDP keeps whole parameters from the forward to the backward, because freeing them in between is switched off."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.block_shapes import find_first_backward
from zerotop.analysis.annotations.support.evidence import Evidence, Group
from zerotop.analysis.memory.tensor_inventory import UNSHARDED_PARAMETERS

_KIND = FindingKind(
    name="kept_gathered",
    severity=Severity.INFO,
    confidence=0.99,
    headline="FSDP keeps {gathered_bytes:bytes} of gathered parameters on each rank until the backward",
    details=(
        "They lie beside {counted_bytes:bytes} of other parameters, gradients and optimizer state. Freed after each layer's"
        " forward, they have to be gathered once more for the backward."
    ),
    advice="Free them if memory is short; keeping them saves communication.",
    fix="{reshard}",
)
_SETTINGS = {
    "FSDP": "sharding_strategy=ShardingStrategy.FULL_SHARD",
    "FSDP2": "fully_shard(layer, reshard_after_forward=True)",
}
# Of everything counted: below it the freed memory would not be noticed.
_LEAST_SHARE = 0.1


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report once for each attempt of the job, after its first step."""
    for group in recording.groups:
        if _KIND.name not in group.reported and len(group.lead.steps):
            group.reported.add(_KIND.name)
            yield from _find_gathered(group)


def _find_gathered(group: Group) -> Iterator[Annotation]:
    lead = group.lead
    sharding, parallelism = lead.engine.get("sharding") or {}, lead.engine.get("parallelism")
    if sharding.get("reshards", True) or parallelism not in _SETTINGS:
        return
    sizes = find_first_backward(lead).get("device" if lead.is_on_gpu else "host") or {}
    gathered = sizes.get(UNSHARDED_PARAMETERS, 0)
    counted = sum(sizes.values()) - gathered
    if gathered > _LEAST_SHARE * (gathered + counted):
        evidence = {"gathered_bytes": gathered, "counted_bytes": counted}
        yield _KIND.at_steps(group, lead.steps[:1], evidence, reshard=_SETTINGS[parallelism])
