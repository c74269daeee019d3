"""PyTorch ran out of device memory: who asked for how much, and why there was not so much.

Cause and advice are those of the post-mortem (``zerotop.analysis.failures.out_of_memory``) as it was known at the error.
"""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.annotations.support.annotation import Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Facts
from zerotop.analysis.failures.failure import place
from zerotop.analysis.failures.out_of_memory import PostMortem, at_the_error
from zerotop.session.reader import Event

_NUMBERS = (
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


class _Told(set[int | None]):
    """The steps of an attempt that were told."""


def detect(facts: Facts) -> Iterator[Annotation]:
    """One finding for each step in which a rank of an attempt ran out of memory: the first that did."""
    for group in facts.groups:
        told = group.kept(_Told)
        errors = [event for process in group.processes for event in process.events("out_of_memory")]
        for event in sorted(errors, key=lambda error: error.unix_ns):
            step = event.facts.get("step")
            if step not in told:
                told.add(step)
                yield _annotation(event, at_the_error(facts.session, event))


def _annotation(event: Event, found: PostMortem) -> Annotation:
    seen = {name: float(size) for name in _NUMBERS if (size := getattr(found, name)) is not None and size >= 0}
    if found.reserved_bytes is not None and found.allocated_bytes is not None:
        seen["unallocated_bytes"] = float(found.reserved_bytes - found.allocated_bytes)
    where = place(found.phase, found.outer_phase, found.step)
    return Annotation(
        name="out_of_memory",
        begin_ns=event.unix_ns,
        end_ns=event.unix_ns,
        known_ns=event.unix_ns,
        step=found.step if found.step is not None and found.step >= 0 else None,
        ranks=(event.rank,),
        severity=Severity.ERROR,
        confidence=found.confidence,
        sentence=f"Rank {event.rank} ran out of GPU memory{where}. {found.cause}",
        advice=found.advice,
        evidence=seen | {"evaluating": float(found.outer_phase == "eval")},
    )
