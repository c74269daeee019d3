"""PyTorch ran out of device memory: the rank, the size of its request, and the reason for the failure.

Cause and advice are those of the post-mortem (``zerotop.analysis.failures.out_of_memory``), as known at the time of the
error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Process
from zerotop.analysis.annotations.support.lines.line_findings import await_each
from zerotop.analysis.annotations.support.lines.stack_lines import find_deadline
from zerotop.analysis.failures.last_moments import describe_place
from zerotop.analysis.failures.out_of_memory import PostMortem, explain_at_error
from zerotop_probe.recording.events import OutOfMemory

_KIND = FindingKind(
    name="out_of_memory",
    severity=Severity.ERROR,
    confidence=0.8,
    headline="Rank {rank} ran out of GPU memory{place}",
    details="{cause}",
    advice="{advice}",
    fix="{fix}",
)
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


# In a counted step the micro-batch is recorded after the error, with the forward that failed (ns).
_PATIENCE_NS = 2_000_000_000


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report each step in which a rank of an attempt ran out of memory: the first rank that did."""
    for group in recording.groups:
        errors = sorted(_read_errors(group), key=lambda error: error[1].unix_ns)
        for (_, event), known in await_each(group, _KIND.name, errors, lambda error: _await_batch(*error)):
            key = _KIND.name, event.step
            if key not in group.reported:
                group.reported.add(key)
                yield _build_finding(group, event, known.known_ns, explain_at_error(recording.at.at(known.known_ns), event))


def _read_errors(group: Group) -> Iterator[tuple[Process, OutOfMemory]]:
    for process in group.processes:
        yield from ((process, error) for error in process.read_new_items(process.events_of(OutOfMemory), _KIND.name))


class _Known(NamedTuple):
    known_ns: int


def _await_batch(process: Process, event: OutOfMemory) -> _Known | None:
    """Return when all that is recorded about a failure is known; None while its micro-batch may still come."""
    if event.rows is not None:
        return _Known(event.unix_ns)
    deadline_ns = find_deadline(process, event.unix_ns, _PATIENCE_NS)
    return _Known(deadline_ns) if process.at.cursor_ns >= deadline_ns else None


def _build_finding(group: Group, event: OutOfMemory, known_ns: int, post_mortem: PostMortem) -> Annotation:
    step = post_mortem.step
    evidence = {name: size for name in _NUMBER_FIELDS if (size := getattr(post_mortem, name)) is not None and size >= 0}
    if post_mortem.reserved_bytes is not None and post_mortem.allocated_bytes is not None:
        evidence["unallocated_bytes"] = post_mortem.reserved_bytes - post_mortem.allocated_bytes
    return _KIND.with_changes(confidence=post_mortem.confidence).at(
        group,
        event.unix_ns,
        event.unix_ns,
        known_ns=known_ns,
        evidence=evidence | {"evaluating": post_mortem.outer_phase == "eval"},
        step=step if step is not None and step >= 0 else None,
        ranks=[event.writer.rank],
        place=describe_place(post_mortem.phase, post_mortem.outer_phase, step),
        cause=post_mortem.cause,
        advice=post_mortem.advice,
        fix=post_mortem.fix,
    )
