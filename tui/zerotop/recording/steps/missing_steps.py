"""Steps that were not recorded, for example because the disk was full.

The table of steps has a row for each of them, so that the steps of all ranks stay aligned. Such a row has a number, and the
begin and end of the whole gap; ``iteration_s`` and every other time is NaN, every count and size UNKNOWN. The same holds for
a step that lost some spans, because its times are too short, and for the first step after a gap, whose begin is unknown.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.samples import Rows
from zerotop_probe.recording.tables import UNKNOWN

# Rows that a process gets for missing steps: damaged step numbers must not fill the memory.
MOST_MISSING = 100_000
_FEW_STEPS = 16
_KEPT_COLUMNS = ("rank", "step", "steps", "skipped", "light", "counted", "begin_unix_ns", "end_unix_ns")


def find_recorded(rows: Rows) -> NDArray[np.bool_]:
    """Return which steps were recorded completely."""
    recorded: NDArray[np.bool_] = ~np.isnan(rows["iteration_s"])
    return recorded


def insert_missing_steps(rows: Rows, last_step: int, most: int = MOST_MISSING) -> Rows:
    """Return consecutive steps of a process, with rows for the missing numbers.

    Numbers also jump when a checkpoint is loaded; the steps in between were never made. ``last_step``: the number of the
    step before the first row. ``most``: the largest number of inserted rows; the first step after a longer gap has no time
    either.
    """
    if len(rows) <= _FEW_STEPS and _are_consecutive(rows["step"].tolist(), rows["steps"].tolist(), last_step):
        return rows
    missing = np.diff(rows["step"], prepend=last_step) - rows["steps"]
    missing[(missing < 0) | (rows["checkpoint_s"] > 0) & find_recorded(rows)] = 0
    rows["iteration_s"][missing > 0] = np.nan
    missing[missing.cumsum() > most] = 0
    if not missing.any():
        return rows
    counts = missing + 1
    filled = np.repeat(rows, counts)
    left = np.repeat(counts.cumsum(), counts) - np.arange(len(filled)) - 1  # until the recorded one
    filled["step"] -= np.where(left > 0, left + filled["steps"] - 1, 0)
    filled["steps"][left > 0] = 1
    filled["skipped"] &= left == 0
    filled["light"] &= left == 0
    filled["counted"] &= left == 0
    return filled


def _are_consecutive(numbers: list[int], counts: list[int], last_step: int) -> bool:
    """Whether no number is missing, found faster for a few."""
    for number, count in zip(numbers, counts, strict=True):
        if number - last_step > count:
            return False
        last_step = number
    return True


def erase_measures(rows: Rows) -> None:
    """Erase wrong values in the rows of steps that were not recorded completely."""
    unknown = ~find_recorded(rows)
    if unknown.any():
        for name in rows.dtype.names or ():
            if name not in _KEPT_COLUMNS:
                rows[name][unknown] = np.nan if rows.dtype[name].kind == "f" else UNKNOWN
