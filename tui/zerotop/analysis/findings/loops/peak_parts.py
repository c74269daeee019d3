"""Large parts of the memory peak of a loop: activations, gradients held twice, parameters that FSDP keeps gathered.

Activations are what the forward saves for the backward, grouped by the layers that made them. The second copy of all
gradients are the buckets of DistributedDataParallel. FSDP keeps whole parameters from the forward to the backward if freeing
them in between is switched off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.memory.block_shapes import LOGITS, BlockGroup, find_first_backward, read_groups
from zerotop.analysis.findings.support.memory.phase_peaks import SettledPeaks, find_settled_peaks
from zerotop.analysis.formatting import Text
from zerotop.analysis.memory.tensor_inventory import BEFORE_UPDATE, GRADIENT_BUCKETS, GRADIENTS, UNSHARDED_PARAMETERS
from zerotop_probe.recording.events import EngineFacts, Tensors

_SAVED = FindingKind(
    name="saved_activations",
    severity=Severity.INFO,
    confidence=0.9,
    headline="Activations are {share:percent} of the memory peak: backward begins with {activation_bytes:bytes}",
    details=(
        "The peak is {backward_peak_bytes:bytes}. Among the activations are {parts}."
        "[ Up to {copies:bytes} of them are autocast's 16-bit copies of weights.]{frozen}"
    ),
    advice="To lower the peak, recompute activations or lower {batch_size}.",
    fix="{recompute_fix}",
)
_CHECKPOINTING_ADVICE = "To lower the peak, lower {batch_size}: gradient checkpointing is on already."
_FROZEN = " Frozen weights need neither gradients nor optimizer state, but as many activations as others."
_NAMES = {"hidden": "the model's width", "intermediate": "the width of its MLPs", "attention": "attention matrices"}
_BUCKETS = FindingKind(
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
_GATHERED = FindingKind(
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
_RESHARD_SETTINGS = {
    "FSDP": "sharding_strategy=ShardingStrategy.FULL_SHARD",
    "FSDP2": "fully_shard(layer, reshard_after_forward=True)",
}
# The least share of the peak of buckets or gathered parameters: freeing less would hardly be noticed.
_LEAST_SHARE = 0.05
# The least share of the peak of the activations without logits, and of a group of blocks that is named.
_SAVED_SHARE = 0.4
_NAMED_SHARE = 0.03
_MOST_NAMED = 2


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each part once for each attempt of the job, when the optimizer's state is there."""
    group, peaks = window.subject, find_settled_peaks(window.subject.lead)
    if peaks is not None:
        window.is_closed = True
        yield from _find_activations(group, peaks)
        yield from _find_buckets(group, peaks)
        yield from _find_gathered(group, peaks)


def _find_activations(group: Group, peaks: SettledPeaks) -> Iterator[Finding]:
    engine, inventory = group.lead.engine, find_first_backward(group.lead)
    blocks, peak = read_groups(engine, inventory), peaks.highest_bytes
    unclaimed = inventory.unclaimed_bytes if inventory is not None else None
    activations = (unclaimed or 0) - sum(b.total_bytes for b in blocks if b.width == LOGITS)
    named = [b for b in blocks if b.width in _NAMES and b.total_bytes > _NAMED_SHARE * peak][:_MOST_NAMED]
    if not named or peaks.owner != "backward" or activations < _SAVED_SHARE * peak:
        return
    evidence = {"activation_bytes": activations, "backward_peak_bytes": peak}
    trainable, parameters = engine.trainable_parameters or 0, engine.parameters or 0
    kind = _SAVED.with_changes(advice=_CHECKPOINTING_ADVICE, fix="") if engine.activation_checkpointing else _SAVED
    yield group.keep_saving_advice(kind, int(peaks.steps["end_unix_ns"][-1])).at_steps(
        group,
        peaks.steps,
        evidence | {f"{b.width}_{b.item_bytes}_bytes": b.total_bytes for b in named},
        share=activations / peak,
        parts=_describe_groups(named),
        copies=copies if (copies := _compute_copies(engine)) > _NAMED_SHARE * peak else None,
        frozen=_FROZEN if trainable < parameters / 2 else "",
    )


def _compute_copies(engine: EngineFacts) -> int:
    """Return the bytes of 16-bit weight copies that autocast caches until its context ends, if layers cast all weights.

    Only copies of trained float32 weights are cached: ``cache_enabled`` of https://docs.pytorch.org/docs/stable/amp.html.
    """
    casts = engine.autocast in ("bf16", "fp16") and engine.dtype == "fp32"
    return 2 * (engine.trainable_parameters or 0) if casts and not engine.sharding else 0


def _describe_groups(groups: Sequence[BlockGroup]) -> Text:
    """Return for example ``4.03 GiB in 96 blocks of 4 x 512 x 11,008 in 2 bytes (the width of its MLPs)``."""
    parts, values = [], {}
    for number, group in enumerate(groups):
        shape = " x ".join(f"{size:,}" for size in group.shape)
        blocks = f"{group.count} blocks of {shape} elements of {group.item_bytes} bytes ({_NAMES[group.width]})"
        parts.append(f"{{size{number}:bytes}} in {blocks}")
        values[f"size{number}"] = group.total_bytes
    return Text(", ".join(parts), values)


def _find_buckets(group: Group, peaks: SettledPeaks) -> Iterator[Finding]:
    tables = (event.device for event in group.lead.events_of(Tensors) if event.when == BEFORE_UPDATE)
    sizes = next(tables, None) or {}
    buckets, peak = sizes.get(GRADIENT_BUCKETS, 0), peaks.highest_bytes
    if buckets > _LEAST_SHARE * peak:
        evidence = {"bucket_bytes": buckets, "gradient_bytes": sizes.get(GRADIENTS, 0), "peak_bytes": peak}
        kind = group.keep_saving_advice(_BUCKETS, int(peaks.steps["end_unix_ns"][-1]))
        yield kind.at_steps(group, peaks.steps, evidence, share=buckets / peak)


def _find_gathered(group: Group, peaks: SettledPeaks) -> Iterator[Finding]:
    engine = group.lead.engine
    inventory, parallelism = find_first_backward(group.lead), engine.parallelism
    sizes = (inventory.device if inventory is not None else None) or {}
    reshards = engine.sharding is None or engine.sharding.reshards is not False
    gathered = sizes.get(UNSHARDED_PARAMETERS, 0)
    is_noticed = gathered > _LEAST_SHARE * peaks.highest_bytes
    if is_noticed and not reshards and parallelism in _RESHARD_SETTINGS:
        evidence = {"gathered_bytes": gathered, "counted_bytes": sum(sizes.values()) - gathered}
        kind = group.keep_saving_advice(_GATHERED, int(peaks.steps["end_unix_ns"][-1]))
        yield kind.at_steps(group, peaks.steps, evidence, reshard=_RESHARD_SETTINGS[parallelism])
