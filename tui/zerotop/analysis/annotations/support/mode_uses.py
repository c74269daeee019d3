"""When a rank's modes for debugging were on: autograd's anomaly mode, and PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.annotations.support.rank_process import Process
from zerotop.analysis.code_line import CodeLine
from zerotop_probe.recording import events

ANOMALY, PROFILER = "anomaly", "profiler"

NAMES = {ANOMALY: "anomaly mode", PROFILER: "PyTorch's profiler"}
"""How sentences name each mode."""

# A mode that was on for so many steps, and so many seconds, was not only meant for these.
_LASTING = {ANOMALY: (10, 1.0), PROFILER: (50, 10.0)}


class ModeUse(NamedTuple):
    """A time in which a mode was on, in unix nanoseconds."""

    mode: str
    begin_ns: int
    known_ns: int
    end_ns: int | None  # None while it is on
    end_known_ns: int | None
    line: CodeLine | None  # that switched it on, if it is known

    def find_lasting(self, process: Process) -> int | None:
        """Return when it was on for long enough to be told; None while it was not, or if it was switched off before."""
        (fewest, seconds), ends = _LASTING[self.mode], process.steps["end_unix_ns"]
        index = int(np.searchsorted(ends, self.begin_ns, "right")) + fewest - 1
        index = max(index, int(np.searchsorted(ends, self.begin_ns + round(seconds * 1e9))))
        if index >= len(ends) or (self.end_known_ns is not None and ends[index] >= self.end_known_ns):
            return None
        return max(int(ends[index]), self.known_ns)


def list_uses(process: Process) -> list[ModeUse]:
    """Return the times in which modes were on, by their begins."""
    uses: dict[str, list[ModeUse]] = {mode: [] for mode in NAMES}
    for event in process.events_named(events.DEBUG_MODE):
        facts = event.facts
        known, begin_ns = uses.get(facts["mode"]), facts["begin_ns"] + process.source.offset_ns
        if known is None:
            continue
        if facts["on"]:
            known.append(ModeUse(facts["mode"], begin_ns, event.unix_ns, None, None, _read_line(facts)))
        elif known:
            known[-1] = known[-1]._replace(end_ns=begin_ns, end_known_ns=event.unix_ns)
    return sorted((use for each in uses.values() for use in each), key=lambda use: use.begin_ns)


def _read_line(facts: Mapping[str, Any]) -> CodeLine | None:
    file, line, function = (facts.get(name) for name in ("file", "line", "function"))
    if not file or not line or not function or not (file.isprintable() and function.isprintable()):
        return None
    return CodeLine(file, line, function, ())
