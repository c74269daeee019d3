"""``zerotop microscope``: have a running job record every allocation of its next steps, and print the result."""

# No findings of the future here: that import would take the name of the function.
import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from zerotop.analysis.formatting import format_bytes, format_gib
from zerotop.analysis.memory.microscope import AllocationTrace, read_traces
from zerotop.analysis.processes.phases import find_phase_name
from zerotop.analysis.text_tables import align_columns
from zerotop.commands.common.errors import Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.exit_messages import write_messages
from zerotop.commands.common.live_recording import RunningRecording
from zerotop.commands.common.node_orders import MICROSCOPE, await_answers, has_nodes, order_nodes
from zerotop.commands.job.microscope_request import request_trace
from zerotop.recording import catalog
from zerotop.recording.reader import Recording
from zerotop_probe.outside.job import job_control
from zerotop_probe.recording import events

_POLL_S = 0.2


def microscope(options: argparse.Namespace) -> int:
    """Print the traces of all ranks with a GPU. Return 0. Raises Problem when the job does not answer."""
    path = catalog.find_recording(options.recording)
    recording = RunningRecording.open(path)
    traces = read_traces(recording.at(recording.end_ns))
    # A collected one that is silent may have nobody who collects it: asking its nodes says so.
    if recording.is_live or (not recording.is_over and job_control.read_facts(str(path)).collected):
        if not recording.sources["allocator"]:
            raise Problem("No rank of this job uses PyTorch's allocator on a GPU: there are no allocations to trace")
        try:
            last = max((trace.request for trace in traces), default=0)
            steps, stacks = options.steps, options.stacks
            request = request_trace(str(path), steps=steps, stacks=stacks, after=last)
            number = None
            if has_nodes(path):
                number = order_nodes(path, MICROSCOPE, request=request, steps=steps, stacks=stacks)
        except OSError as error:
            raise Problem(f"Cannot write the request to {path}: {error.strerror}") from error
        if number is not None:
            write_messages(*_ask_nodes(path, number))
        traces = _await_traces(recording, request, options.wait)
    if not traces:
        raise Problem("No allocation trace in this recording, and its job has ended")
    print(json.dumps([_build_json(trace) for trace in traces], indent=1) if options.json else _format_traces(traces))
    return 0


def _ask_nodes(path: Path, number: int) -> list[str]:
    """Return the sentences of other nodes. Raise Problem if no rank at all was asked."""
    try:
        return await_answers(path, number)[0]
    except Problem as error:
        if job_control.read_facts(str(path)).collected:
            raise
        return [f"{error}."]


def _await_traces(recording: Recording, request: int, wait_s: float) -> tuple[AllocationTrace, ...]:
    """Return the traces of a request once all ranks with a GPU have answered, or those there are after ``wait_s``."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and recording.is_live:
        recording.refresh()
        answers = [event for event in recording.events_of(events.Microscope) if event.request == request]
        if len(answers) == len(recording.sources["allocator"]):
            break
        time.sleep(_POLL_S)
    traces = tuple(trace for trace in read_traces(recording.at(recording.end_ns)) if trace.request == request)
    if not traces:
        raise Problem(f"No rank finished the steps within {wait_s:.0f} s. Try again with a longer --wait")
    return traces


def _build_json(trace: AllocationTrace) -> dict[str, Any]:
    facts = dataclasses.asdict(trace)
    plain = {field: facts[field].tolist() for field in ("times_ns", "curve_bytes", "changes_ns")}
    named = {field: [find_phase_name(code) for code in facts[field].tolist()] for field in ("phases", "changed_to")}
    return {**facts, **plain, **named}


def _format_traces(traces: tuple[AllocationTrace, ...]) -> str:
    return "\n".join(escape_unprintable(line) for trace in traces for line in _format_trace(trace))


def _format_trace(trace: AllocationTrace) -> list[str]:
    head = f"trace {trace.request}, rank {trace.rank}, steps {trace.first_step} to {trace.first_step + trace.steps - 1}"
    if trace.refused:
        return [f"{head}: refused. {trace.refused}"]
    duration_s, peak_s = (trace.end_ns - trace.begin_ns) / 1e9, (trace.peak_ns - trace.begin_ns) / 1e9
    rows = [(format_bytes(trace.before_bytes), "allocated before the trace")]
    for block in trace.largest:
        rows.append(
            (format_bytes(block.size_bytes), f"allocated in {block.phase}, {block.age_ns / 1e6:.1f} ms before the peak")
        )
    lines = [
        f"{head}: {len(trace.curve_bytes)} allocations and frees in {duration_s:.3f} s",
        f"  peak {format_gib(trace.peak_bytes)} GiB requested, in {trace.peak_phase}, {peak_s:.3f} s after the start",
        *(f"  {line}" for line in align_columns(rows, "><")),
    ]
    if trace.snapshot:
        lines.append(f"  snapshot with stacks, for pytorch.org/memory_viz: {trace.snapshot}")
    return lines
