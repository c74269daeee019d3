"""PyTorch ran out of device memory: the rank, the size of its request, and the reason for the failure.

Cause and advice are those of the post-mortem (``zerotop.analysis.failures.out_of_memory``), as known at the time of the
error.
"""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.failures.last_moments import describe_place
from zerotop.analysis.failures.out_of_memory import PostMortem, explain_at_error
from zerotop.analysis.failures.rank_ends import read_printed_ends
from zerotop.analysis.failures.tracebacks import Traceback
from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.lines.stack_lines import find_deadline
from zerotop.analysis.findings.support.links import Kinds, grew_by_missing, others_took_missing, step_took_missing
from zerotop_probe.recording.events import OutOfMemory

_KIND = FindingKind(
    name="out_of_memory",
    severity=Severity.ERROR,
    confidence=0.8,
    headline="Rank {rank} ran out of GPU memory{place}",
    details="{cause}[ The error came from {line}.]",
    advice="{advice}",
    fix="{fix}",
    explained_by=(
        Kinds(grew_by_missing, "memory_creep"),
        Kinds(step_took_missing, "memory_step"),
        Kinds(others_took_missing, "others_arrived", "others_on_gpu"),
    ),
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


# In a counted step the micro-batch is recorded after the error, with the forward that failed (ns). An error that ends the
# rank is printed after it.
_PATIENCE_NS = 2_000_000_000


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each step in which a rank of an attempt ran out of memory: the first rank that did."""
    errors = [(event, process) for process in window.subject.processes for event in process.events_of(OutOfMemory)]
    first: dict[int | None, tuple[OutOfMemory, Process]] = {}
    for event, process in sorted(errors, key=lambda error: error[0].unix_ns):
        first.setdefault(event.step, (event, process))
    for (event, process), known_ns in window.await_each(window.items([*first.values()]), lambda error: _await_rest(*error)):
        yield _build_finding(window.subject, event, process, explain_at_error(process.at.at(known_ns), event), known_ns)


def _await_rest(event: OutOfMemory, process: Process) -> int | None:
    """Return when all that is recorded about a failure is known; None while its micro-batch or line may still come."""
    printed = _find_printed(event, process, event.unix_ns + _PATIENCE_NS)
    if event.rows is not None and printed is not None:
        return printed.time_ns
    deadline_ns = find_deadline(process, event.unix_ns, _PATIENCE_NS)
    return deadline_ns if process.at.cursor_ns >= deadline_ns else None


def _find_printed(event: OutOfMemory, process: Process, until_ns: int) -> Traceback | None:
    """Return the error as the rank's output has it; None if the script went on, or did not print it yet."""
    for one in read_printed_ends(process.at.at(min(until_ns, process.at.cursor_ns))).tracebacks:
        is_own = one.rank in (None, event.writer.rank) and one.error.endswith("OutOfMemoryError")
        if is_own and one.time_ns >= event.unix_ns:
            return one
    return None


def _build_finding(group: Group, event: OutOfMemory, process: Process, post_mortem: PostMortem, known_ns: int) -> Finding:
    step, printed = post_mortem.step, _find_printed(event, process, known_ns)
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
        line=printed.place or None if printed is not None else None,
        advice=post_mortem.advice,
        fix=post_mortem.fix,
    )
