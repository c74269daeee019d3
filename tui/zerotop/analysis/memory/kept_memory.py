"""Memory that a rank still holds after a step, and by how much it grows from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zerotop.recording.reader import Source
from zerotop_probe.recording.tables import END, PHASE_CODE, TICK

_TAIL_ROWS = 4096  # readings to look back through
_STEPS = 13  # after which memory is compared
_MIN_STEPS = 5
_MIN_GROWTH = 1 << 20  # bytes a step; less is not worth a word


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """Memory growth from step to step in the last readings of an allocator, and whether a step is in progress."""

    is_between_steps: bool  # no phase has begun since the last step ended
    growth_bytes: int  # a step, median; 0 where it does not grow in each of the last steps


def read_kept_memory(source: Source, cursor_ns: int) -> KeptMemory:
    """Read it from an allocator's table at a cursor."""
    rows = source.until(cursor_ns)[-_TAIL_ROWS:]
    if not len(rows):
        return KeptMemory(False, 0)
    edges = np.flatnonzero((rows["edge"] != TICK) & (rows["device"] == rows["device"][-1]))
    ends = edges[(rows["edge"][edges] == END) & (rows["phase"][edges] == PHASE_CODE["step"])]
    if not len(ends):
        return KeptMemory(False, 0)
    last = rows[ends[-_STEPS:]]
    # After several counted steps there is one reading.
    growth = np.diff(last["allocated_bytes"]) / np.maximum(1, np.diff(last["step"]))
    grows = len(growth) >= _MIN_STEPS and bool((growth > 0).all())
    median = int(np.median(growth)) if grows else 0
    is_between_steps = rows["time_ns"][edges[-1]] == rows["time_ns"][ends[-1]]
    return KeptMemory(bool(is_between_steps), median if median >= _MIN_GROWTH else 0)
