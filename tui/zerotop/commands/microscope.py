"""``zerotop microscope``: has a running job record every allocation of its next steps, and tells what was seen."""

# No annotations of the future here: that import would take the name of the function.
import argparse
import dataclasses
import json
import time
from typing import Any

from zerotop.analysis.memory.microscope import AllocationTrace, read_traces
from zerotop.analysis.processes.phases import phase_name
from zerotop.commands.common.errors import Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.live_session import RunningSession
from zerotop.commands.job.microscope_request import request_trace
from zerotop.session import catalog
from zerotop.session.reader import Session

_POLL_S = 0.2
_GIB = 1 << 30
_MIB = 1 << 20


def microscope(options: argparse.Namespace) -> int:
    """Prints what was seen by every rank that has a GPU. Returns 0.

    Raises Problem when the job does not answer.
    """
    path = catalog.find_session(options.session)
    session = RunningSession.open(path)
    found = read_traces(session, session.end_ns)
    if session.is_live:
        if not session.sources["allocator"]:
            raise Problem("No rank of this job uses PyTorch's allocator on a GPU, so there is nothing to look at.")
        try:
            before = max((look.request for look in found), default=0)
            request = request_trace(str(path), steps=options.steps, stacks=options.stacks, after=before)
        except OSError as error:
            raise Problem(f"The request cannot be written into {path}: {error.strerror}.") from error
        found = _await_traces(session, request, options.wait)
    if not found:
        raise Problem("Nobody looked through the microscope in this recording, and its job runs no more.")
    print(json.dumps([_build_dict(look) for look in found], indent=1) if options.json else _format_traces(found))
    return 0


def _await_traces(session: Session, request: int, wait_s: float) -> tuple[AllocationTrace, ...]:
    """What the ranks with a GPU saw, once all have told."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and session.is_live:
        session.refresh()
        answers = [event for event in session.events if event.name == "microscope" and event.facts["request"] == request]
        if len(answers) == len(session.sources["allocator"]):
            break
        time.sleep(_POLL_S)
    found = tuple(look for look in read_traces(session, session.end_ns) if look.request == request)
    if not found:
        raise Problem(f"No rank has ended the steps within {wait_s:.0f} s: ask again with a longer --wait.")
    return found


def _build_dict(look: AllocationTrace) -> dict[str, Any]:
    facts = dataclasses.asdict(look)
    plain = {field: facts[field].tolist() for field in ("times_ns", "curve_bytes", "changes_ns")}
    named = {field: [phase_name(code) for code in facts[field].tolist()] for field in ("phases", "changed_to")}
    return {**facts, **plain, **named}


def _format_traces(found: tuple[AllocationTrace, ...]) -> str:
    return "\n".join(escape_unprintable(line) for look in found for line in _format_trace(look))


def _format_trace(look: AllocationTrace) -> list[str]:
    head = f"look {look.request}, rank {look.rank}, steps {look.first_step} to {look.first_step + look.steps - 1}"
    if look.refused:
        return [f"{head}: refused. {look.refused}"]
    at_s = (look.peak_ns - look.begin_ns) / 1e9
    lines = [
        f"{head}: {len(look.curve_bytes)} allocations and frees in {(look.end_ns - look.begin_ns) / 1e9:.3f} s",
        f"  peak {look.peak_bytes / _GIB:.3f} GiB requested, in {look.peak_phase}, {at_s:.3f} s after the beginning",
        f"  {look.before_bytes / _GIB:10.3f} GiB there before",
    ]
    for block in look.largest:
        age_ms = block.age_ns / 1e6
        lines.append(f"  {block.size_bytes / _MIB:10.1f} MiB allocated in {block.phase}, {age_ms:.1f} ms before the peak")
    if look.snapshot:
        lines.append(f"  with stacks, for pytorch.org/memory_viz: {look.snapshot}")
    return lines
