"""The model's weights are on the GPU several times from the start, as after a checkpoint was loaded onto it and kept."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.memory.copied_weights import WeightCopies, find_copies
from zerotop.analysis.findings.support.thresholds import JUMP_BYTES
from zerotop.analysis.memory.tensor_inventory import AFTER_UPDATE
from zerotop_probe.recording.events import Tensors

_KIND = FindingKind(
    name="weight_copies",
    severity=Severity.INFO,
    confidence=0.85,
    gpu_bytes="copied_bytes",
    headline="Tensors as large as {weights} are on the GPU {so_often} beside them: {copied_bytes:bytes}",
    details=(
        "Blocks in no category have the sizes of the model's parameters, {so_often} as many, since before the first step. An"
        " average of the weights, another model of the same shape, and one that nothing uses look alike."
    ),
    advice="del the copies that nothing uses, or keep them on the CPU.",
)
_HELD = _KIND.with_changes(
    confidence=0.9,
    details=(
        "{holder} keeps them, in {count:,} tensors of {copied_bytes:bytes}, since before the first step. A checkpoint that"
        " was loaded, an average of the weights, and a script's own states of an optimizer look alike."
    ),
    advice="If {name} is there only to copy its weights into the model, load it onto the CPU, and del it after that.",
    fix='map_location="cpu"',
)
# Copies that are worth a finding: this part of what is allocated after the first update.
_NOTABLE_SHARE = 0.25


@in_each_attempt()
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report once for each attempt, when all ranks have counted their tensors after an update."""
    processes, now_ns = window.subject.processes, window.recording.cursor_ns
    counts = {process.rank: process.events_of(Tensors) for process in processes}
    has_news = sum(len(window.items(events, rank)) for rank, events in counts.items()) > 0
    if not has_news or not all(any(one.when == AFTER_UPDATE for one in events) for events in counts.values()):
        return
    found = {process.rank: copies for process in processes if (copies := find_copies(process, now_ns)) is not None}
    notable = {
        rank: copies
        for rank, copies in found.items()
        if copies.bytes >= max(JUMP_BYTES, _NOTABLE_SHARE * copies.allocated_bytes)
    }
    if notable:
        yield _build_finding(window.subject, notable)


def _build_finding(group: Group, found: dict[int, WeightCopies]) -> Finding:
    """Return the finding with the numbers of the first rank."""
    first, known_ns = next(iter(found.values())), max(one.known_ns for one in found.values())
    kind, holder = group.keep_saving_advice(_KIND if first.holder is None else _HELD, known_ns), first.holder
    return kind.at(
        group,
        known_ns,
        known_ns,
        {"copied_bytes": first.bytes, "copies": first.copies},
        ranks=list(found),
        weights="the frozen weights" if first.is_of_frozen else "the model's weights",
        so_often={1: "once", 2: "twice"}.get(first.copies, f"{first.copies} times"),
        holder=f"{holder.text[:1].upper()}{holder.text[1:]}" if holder is not None else None,
        name=holder.name if holder is not None else None,
        count=holder.count if holder is not None else None,
    )
