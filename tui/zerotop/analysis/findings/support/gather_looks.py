"""The waits of all ranks' compute streams for gathered parameters, in the same few steps under ZeRO-3 or FSDP."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support.evidence import Floats, Group, Process, Rows
from zerotop.analysis.findings.support.lines.stack_lines import find_deadline
from zerotop_probe.recording import events

# The events of all ranks for the same steps are written within this time (ns).
_TOGETHER_NS = 10_000_000_000


class GatherLook(NamedTuple):
    """The measurement of one rank in a few steps, in seconds."""

    rows: Rows  # of the steps (STEP_DTYPE)
    waited: Floats  # total wait of the compute stream in each step
    starved: float  # share of the waits at which the compute stream was idle


class Looks(NamedTuple):
    """The measurements of all ranks in the same steps, in the order of the processes."""

    each: list[GatherLook]
    known_ns: int  # unix time at which all of them were written

    @property
    def iteration_s(self) -> float:
        """The mean duration of these steps."""
        return float(np.mean([look.rows["iteration_s"].mean() for look in self.each]))


def read_looks(group: Group, number: int) -> tuple[int, Looks | None]:
    """Return the looks that begin with the lead's look of a number, or with a later one, and the number of the next.

    Only looks for steps that all ranks have measured count: ranks with different step times share only some. None before
    there are any.
    """
    for event in group.lead.events_of(events.StreamWaits)[number:]:
        each = [_find_event(process, event.first_step) for process in group.processes]
        found = [one for one in each if one is not None]
        if len(found) < len(each):
            deadlines = [find_deadline(process, event.unix_ns, _TOGETHER_NS) for process in group.processes]
            if max(deadlines) > group.lead.at.cursor_ns:
                break
        number += 1
        if len(found) == len(each):
            looks = [_read_look(process, one) for process, one in zip(group.processes, found, strict=True)]
            if len({len(look.waited) for look in looks}) == 1 and all(len(look.rows) == len(look.waited) for look in looks):
                return number, Looks(looks, max(one.unix_ns for one in found))
    return number, None


def _find_event(process: Process, step: int) -> events.StreamWaits | None:
    """Return the complete event of a process that begins with a step, or None."""
    for event in reversed(process.events_of(events.StreamWaits)):
        if event.first_step == step:
            is_complete = len(event.waited_ns) == len(event.waits) == len(event.starved) > 0
            return event if is_complete else None
    return None


def _read_look(process: Process, event: events.StreamWaits) -> GatherLook:
    first, waited = event.first_step, np.array(event.waited_ns) / 1e9
    begin, end = np.searchsorted(process.steps["step"], [first, first + len(waited)])
    starved = sum(event.starved) / max(1, sum(event.waits))
    return GatherLook(process.steps[int(begin) : int(end)], waited, starved)
