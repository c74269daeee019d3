"""PyTorch ran out of device memory: who asked for how much, and why there was not so much.

Cause and advice are those of the post-mortem (``zerotop.analysis.failures.out_of_memory``) as it was known at the error.
"""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.annotations.support.annotation import Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Evidence
from zerotop.analysis.failures.failure import describe_place
from zerotop.analysis.failures.out_of_memory import PostMortem, explain_at_error
from zerotop.session.reader import Event

_NUMBER_FIELDS = (
    "requested_bytes",
    "limit_bytes",
    "free_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "largest_free_block_bytes",
    "others_bytes",
    "rows",
    "sequence",
    "tokens",
)


class _State(set[int | None]):
    """The steps of an attempt that were told."""


def detect(facts: Evidence) -> Iterator[Annotation]:
    """One finding for each step in which a rank of an attempt ran out of memory: the first that did."""
    for group in facts.groups:
        told = group.get_state(_State)
        errors = [event for process in group.processes for event in process.events_named("out_of_memory")]
        for event in sorted(errors, key=lambda error: error.unix_ns):
            step = event.facts.get("step")
            if step not in told:
                told.add(step)
                yield _build_finding(event, explain_at_error(facts.session, event))


def _build_finding(event: Event, post_mortem: PostMortem) -> Annotation:
    seen = {name: float(size) for name in _NUMBER_FIELDS if (size := getattr(post_mortem, name)) is not None and size >= 0}
    if post_mortem.reserved_bytes is not None and post_mortem.allocated_bytes is not None:
        seen["unallocated_bytes"] = float(post_mortem.reserved_bytes - post_mortem.allocated_bytes)
    where = describe_place(post_mortem.phase, post_mortem.outer_phase, post_mortem.step)
    return Annotation(
        name="out_of_memory",
        begin_ns=event.unix_ns,
        end_ns=event.unix_ns,
        known_ns=event.unix_ns,
        step=post_mortem.step if post_mortem.step is not None and post_mortem.step >= 0 else None,
        ranks=(event.rank,),
        severity=Severity.ERROR,
        confidence=post_mortem.confidence,
        sentence=f"Rank {event.rank} ran out of GPU memory{where}. {post_mortem.cause}",
        advice=post_mortem.advice,
        evidence=seen | {"evaluating": float(post_mortem.outer_phase == "eval")},
    )
