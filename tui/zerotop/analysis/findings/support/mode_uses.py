"""The times in which a rank had modes on that slow it down: anomaly mode, the profiler, an emptied allocator cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zerotop.analysis.code_line import CodeLine, read_line
from zerotop.analysis.findings.support.rank_process import Process
from zerotop.analysis.memory.allocator_settings import read_settings
from zerotop_probe.recording import events
from zerotop_probe.recording.event_values import ANOMALY, PROFILER

CLEARING = "clearing"
"""Beside the modes of PyTorch: the allocator's cache is emptied in each step."""

NAMES = {ANOMALY: "anomaly mode", PROFILER: "PyTorch's profiler", CLEARING: "emptying the allocator's cache in each step"}
"""The name of each mode in sentences."""

# A mode that was on for this many steps, and seconds, was not meant only for these.
_LASTING = {ANOMALY: (10, 1.0), PROFILER: (50, 10.0)}
# A line that empties the cache in at least this share of the steps does so in each. These numbers of calls, powers
# of two as in its events, show that it began, and that it lasts.
_CLEARED_SHARE, _FIRST_CLEARINGS, _LASTING_CLEARINGS = 0.8, 4, 16


class ModeUse(NamedTuple):
    """A period in which a mode was on, in unix nanoseconds."""

    mode: str
    begin_ns: int
    known_ns: int
    end_ns: int | None  # None while it is on
    end_known_ns: int | None
    line: CodeLine | None  # that switched it on, if it is known
    call_s: float = 0.0  # of a cache that is emptied: seconds of each call
    lasting_ns: int | None = None  # likewise: when it was known to last

    def find_lasting(self, process: Process) -> int | None:
        """Return when a mode had been on for long enough to report it; None if it never was."""
        if self.mode == CLEARING:
            return self.lasting_ns
        (fewest, seconds), ends = _LASTING[self.mode], process.steps["end_unix_ns"]
        index = int(np.searchsorted(ends, self.begin_ns, "right")) + fewest - 1
        index = max(index, int(np.searchsorted(ends, self.begin_ns + round(seconds * 1e9))))
        if index >= len(ends) or (self.end_known_ns is not None and ends[index] >= self.end_known_ns):
            return None
        return max(int(ends[index]), self.known_ns)


def list_uses(process: Process) -> list[ModeUse]:
    """Return the periods in which modes were on, by their begins."""
    uses: dict[str, list[ModeUse]] = {ANOMALY: [], PROFILER: [], CLEARING: list(_list_clearings(process))}
    for event in process.events_of(events.DebugMode):
        known, begin_ns = uses.get(event.mode), event.begin_ns + process.source.offset_ns
        if known is None:
            continue
        if event.on:
            known.append(ModeUse(event.mode, begin_ns, event.unix_ns, None, None, read_line(event)))
        elif known:
            known[-1] = known[-1]._replace(end_ns=begin_ns, end_known_ns=event.unix_ns)
    return sorted((use for each in uses.values() for use in each), key=lambda use: use.begin_ns)


def launches_block(process: Process) -> bool:
    """Whether each launch on the rank's GPU waits for its kernel: CUDA reads the variable as a number."""
    return process.is_on_gpu and process.environment.get("CUDA_LAUNCH_BLOCKING", "").strip() == "1"


def lacks_cache(process: Process) -> bool:
    """Whether PyTorch's allocator keeps no freed memory of the rank's GPU."""
    return process.is_on_gpu and not read_settings(process.hello).caching


def _list_clearings(process: Process) -> Iterator[ModeUse]:
    """Yield the lines that empty the allocator's cache in each step."""
    uses: dict[int, ModeUse] = {}  # by the first call's begin, which tells lines apart
    ends = process.steps["end_unix_ns"]
    for event in process.events_of(events.CacheCleared):
        known_ns, calls, begin_ns = event.unix_ns, event.calls, event.begin_ns + process.source.offset_ns
        steps = int(np.searchsorted(ends, known_ns) - np.searchsorted(ends, begin_ns))
        if calls < _CLEARED_SHARE * steps:
            continue
        if calls == _FIRST_CLEARINGS:
            uses[begin_ns] = ModeUse(CLEARING, begin_ns, known_ns, None, None, read_line(event), event.seconds / calls)
        elif calls == _LASTING_CLEARINGS and begin_ns in uses:
            uses[begin_ns] = uses[begin_ns]._replace(call_s=event.seconds / calls, lasting_ns=known_ns)
    yield from uses.values()
