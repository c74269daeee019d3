"""A variable collects tensors on the GPU over many steps, and is then cleared, again and again.

Read from the allocated memory after steps, which rises and falls, and from the probe's search for what holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.memory.growing_readings import MemoryReadings
from zerotop.analysis.findings.support.thresholds import USED_SHARE
from zerotop.analysis.memory.leak_holders import choose_holder, describe_holder
from zerotop.analysis.memory.tensor_inventory import HeldTensors
from zerotop_probe.recording.events import Tensors

_KIND = FindingKind(
    name="kept_results",
    confidence=0.9,
    gpu_bytes="most_bytes",
    headline="{holder} collects up to {most_bytes:bytes} on the GPU before it lets them go",
    details="From step {step} to {last_step:.0f} the memory in use after a step rose and fell {rises:.0f} times. {held_by}",
    advice="Collect copies on the host instead: they keep no GPU memory{graphs}.",
    fix=".detach().cpu()",
)
# What memory falls by: the part of the peak, and bytes.
_PEAK_SHARE, _LEAST_BYTES = 0.05, 64 << 20
# The fewest rises in a row that end with a fall, and steps with more memory in each, of which none adds most of it.
_FEWEST_RISES, _FEWEST_STEPS, _MOST_OF_RISE = 2, 4, 0.5


class _Rise(NamedTuple):
    """Readings of memory that rises, and then falls with the next one: the first and the last, and bytes."""

    begin: int
    end: int
    bytes: int


@in_each_attempt()
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report once for each attempt: the first rank on which it is seen."""
    for process in window.subject.processes:
        if any(event.held for event in process.events_of(Tensors)):
            found = _find_kept(process)
            if found is not None:
                yield found


def _find_kept(process: Process) -> Finding | None:
    """Return the finding as soon as memory has risen often enough, and what holds it is known."""
    readings = MemoryReadings.read(process)
    steps, ends_ns, held = readings.select_times(0)
    holder: HeldTensors | None = None
    rises: list[_Rise] = []
    for rise in _list_rises(readings):
        rises.append(rise)
        inside = (one for one in process.events_of(Tensors) if ends_ns[rise.begin] <= one.unix_ns < ends_ns[rise.end + 1])
        for event in inside:
            at = min(int(np.searchsorted(steps, event.step or 0)), rise.end)
            holder = choose_holder(event, int(held[at] - held[rise.begin])) or holder
        if holder is not None and len(rises) >= _FEWEST_RISES:
            break
    else:
        return None
    rows = process.steps[np.searchsorted(process.steps["step"], steps[rises[0].begin]) :]
    rows = rows[: np.searchsorted(rows["step"], steps[rises[-1].end + 1]) + 1]
    peak_bytes = float(rows["allocated_peak_bytes"].max(initial=0))
    is_tight = process.device_bytes is None or peak_bytes >= USED_SHARE * process.device_bytes
    kind = _KIND if is_tight else _KIND.with_changes(severity=Severity.INFO)
    return kind.at_steps(
        process,
        rows,
        {"most_bytes": max(one.bytes for one in rises), "rises": len(rises), "last_step": int(rows["step"][-1])},
        holder=holder.name,
        held_by=describe_holder(holder),
        graphs=" and no graphs" if holder.keeps_graph else "",
    )


def _list_rises(readings: MemoryReadings) -> Iterator[_Rise]:
    """Yield the rises of a process's memory over several steps that end with a fall by at least half of them."""
    (rows, held), begin = readings.select(0), 0
    least = np.maximum(_LEAST_BYTES, _PEAK_SHARE * np.maximum.accumulate(rows["allocated_peak_bytes"]))
    for end in np.flatnonzero(held[:-1] - held[1:] >= least[:-1]).tolist():
        inside = held[begin : end + 1]
        low = int(begin + np.flatnonzero(inside == inside.min())[-1])
        added, grown = np.diff(held[low : end + 1]), int(held[end] - held[low])
        is_steady = (added > 0).sum() >= _FEWEST_STEPS and added.max() <= _MOST_OF_RISE * grown
        if is_steady and grown >= least[end] and 2 * (held[end] - held[end + 1]) >= grown:
            yield _Rise(low, end, grown)
        begin = end + 1
