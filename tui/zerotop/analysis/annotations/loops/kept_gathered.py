"""FSDP keeps whole parameters from the forward to the backward, because freeing them in between is switched off."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group
from zerotop.analysis.annotations.support.memory.block_shapes import find_first_backward
from zerotop.analysis.annotations.support.memory.phase_peaks import SettledPeaks, find_new_peaks
from zerotop.analysis.memory.tensor_inventory import UNSHARDED_PARAMETERS

_KIND = FindingKind(
    name="kept_gathered",
    severity=Severity.INFO,
    confidence=0.99,
    headline="FSDP keeps {gathered_bytes:bytes} of gathered parameters on each rank until backward",
    details=(
        "They come on top of {counted_bytes:bytes} of other parameters, gradients and optimizer state. If they are freed"
        " after each layer's forward, they have to be gathered again for backward."
    ),
    advice="Free them if memory is short; keeping them saves communication.",
    fix="{reshard}",
)
_SETTINGS = {
    "FSDP": "sharding_strategy=ShardingStrategy.FULL_SHARD",
    "FSDP2": "fully_shard(layer, reshard_after_forward=True)",
}
# The least share of the peak: freeing less would hardly be noticed.
_LEAST_SHARE = 0.05


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report once for each attempt of the job, when the optimizer's state is there."""
    for group in recording.groups:
        for peaks in find_new_peaks(group, _KIND.name):
            yield from _find_gathered(group, peaks)


def _find_gathered(group: Group, peaks: SettledPeaks) -> Iterator[Annotation]:
    engine = group.lead.engine
    inventory, parallelism = find_first_backward(group.lead), engine.parallelism
    sizes = (inventory.device if inventory is not None else None) or {}
    reshards = engine.sharding is None or engine.sharding.reshards is not False
    gathered = sizes.get(UNSHARDED_PARAMETERS, 0)
    is_noticed = gathered > _LEAST_SHARE * peaks.highest_bytes
    if is_noticed and not reshards and parallelism in _SETTINGS:
        evidence = {"gathered_bytes": gathered, "counted_bytes": sum(sizes.values()) - gathered}
        kind = group.keep_saving_advice(_KIND, int(peaks.steps["end_unix_ns"][-1]))
        yield kind.at_steps(group, peaks.steps, evidence, reshard=_SETTINGS[parallelism])
