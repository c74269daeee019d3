"""What keeps the tensors of an evaluation, and whether its forwards had gradients enabled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from zerotop.analysis.findings.support import Process
from zerotop.analysis.findings.support.lines.stack_lines import Delay, find_line
from zerotop.analysis.memory.leak_holders import describe_holder
from zerotop.analysis.memory.tensor_inventory import AFTER_UPDATE, HeldTensors, read_held
from zerotop_probe.recording.event_values import AGAIN
from zerotop_probe.recording.events import Tensors, UnusedGraphs

_ENABLED = "The evaluation's forwards had gradients enabled."


class Keeper(NamedTuple):
    """A variable that holds tensors, and since when that is known (unix nanoseconds)."""

    holder: HeldTensors
    known_ns: int


def find_keeper(process: Process, begin_ns: int, end_ns: int, left: int) -> Keeper | None:
    """Return the variable that holds most of what an evaluation left, if no blocks had an unknown holder before it."""
    counts = [one for one in process.events_of(Tensors) if one.unclaimed_bytes is not None]
    earlier = next((one for one in reversed(counts) if one.unix_ns <= begin_ns and one.when in (AFTER_UPDATE, AGAIN)), None)
    later = next((one for one in counts if one.unix_ns > end_ns and one.held), None)
    if earlier is None or later is None:
        return None
    holder = max(read_held(later), key=lambda one: one.bytes, default=None)
    is_most = holder is not None and 2 * (holder.bytes - (earlier.unclaimed_bytes or 0)) >= left
    return Keeper(holder, later.unix_ns) if holder is not None and is_most else None


def describe_keeper(process: Process, begin_ns: int, end_ns: int, known_ns: int, keeper: Keeper | None) -> dict[str, Any]:
    """Return the values of a finding about what an evaluation left, and its advice; empty if nothing says why it stays."""
    holder = keeper.holder if keeper is not None else None
    # A graph keeps its own blocks, whatever the tensor at its end is a view of.
    plain = replace(holder, view_of=()) if holder is not None and holder.keeps_graph else holder
    line = None
    if holder is None or not holder.line:
        line = find_line(Delay(process, "eval", begin_ns, end_ns, known_ns, is_all_work=True))
    unused = [one for one in process.events_of(UnusedGraphs) if one.unix_ns <= known_ns]
    offset_ns = process.source.offset_ns
    is_unused = any(one.begin_ns + offset_ns < end_ns and one.end_ns + offset_ns > begin_ns for one in unused)
    has_graphs = is_unused or (holder is not None and holder.keeps_graph)
    if holder is None and not has_graphs:  # it may be what an evaluation loads once
        return {}
    numbers = f"Keep numbers in {holder.name} (.item())" if holder is not None else ""
    return {
        "keeper": holder.name if holder is not None else None,
        "held_by": describe_holder(plain) if plain is not None else None,
        "enabled": _ENABLED if has_graphs else None,
        "line": line.text if line is not None else None,
        "advice": "Evaluate under torch.no_grad(): then no graphs are kept."
        if has_graphs
        else f"{numbers}, or copies on the host, instead of tensors on the GPU.",
        "fix": "with torch.no_grad():" if has_graphs else ".item()",
    }
