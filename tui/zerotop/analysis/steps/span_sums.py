"""What the spans of a step add up to."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop_probe.recording.tables import EVAL, PHASE_CODE, PHASES

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Columns that add up the host time of phases.
DURATION_COLUMNS = {
    "data_s": ("data",),
    "forward_s": ("forward",),
    "backward_s": ("backward",),
    "step_s": ("step",),
    "optimizer_s": ("optimizer", "cpu_optimizer"),
    "eval_s": ("eval",),
    "checkpoint_s": ("checkpoint_save", "checkpoint_load"),
}
# What forwards say of their micro-batch.
SIZE_COLUMNS = ("rows", "tokens")
# All that is added up: nothing, nanoseconds, counts, and of how many forwards each size is known.
SUM_COLUMNS = ("", *DURATION_COLUMNS, "micro_steps", *SIZE_COLUMNS, *(f"{name} known" for name in SIZE_COLUMNS))
COLUMN_INDEX = {name: place for place, name in enumerate(SUM_COLUMNS)}
# A phase of these counts only when it is outermost: within an evaluation it is the evaluation's time.
_OUTERMOST = ("data", "eval", "checkpoint_save", "checkpoint_load")


def _build_columns() -> NDArray[np.intp]:
    """Where in SUMS a span's time goes, at 2 * phase + (1 where nested); the last phase stands for unknown newer ones."""
    places = np.zeros((len(PHASES) + 1, 2), np.intp)
    for column, names in DURATION_COLUMNS.items():
        for name in names:
            places[PHASE_CODE[name]] = COLUMN_INDEX[column], 0 if name in _OUTERMOST else COLUMN_INDEX[column]
    return places.ravel()


_SPAN_COLUMNS = _build_columns()


def sum_spans(spans: NDArray[Any], closing: Ints, process_indices: Ints) -> Floats:
    """What the spans of processes up to each closing one add up to; of each process the last is of a step in progress.

    ``of`` has the place of each span's process, ascending; the shape is (closing + processes, SUMS).

    Nanoseconds are whole numbers, which floats hold exactly for 100 days: the order of adding does not matter.
    """
    begins = np.zeros(len(spans) + 1, np.intp)
    begins[closing + 1] = 1
    step = begins[:-1].cumsum() + process_indices
    count, width = len(closing) + int(process_indices[-1]) + 1, len(SUM_COLUMNS)
    place = _SPAN_COLUMNS.take(np.minimum(spans["phase"], len(PHASES)) * np.uint16(2) + (spans["depth"] > 0))
    place[spans["flags"] & EVAL != 0] = 0
    duration = spans["end_ns"] - spans["begin_ns"]
    sums = np.asarray(np.bincount(step * width + place, duration, count * width), np.float64).reshape(count, width)
    sums[:, COLUMN_INDEX["micro_steps"]] = np.bincount(step[place == COLUMN_INDEX["backward_s"]], minlength=count)
    forward = np.flatnonzero(place == COLUMN_INDEX["forward_s"])
    for name in SIZE_COLUMNS:
        known = forward[(sizes := spans[name][forward]) >= 0]
        sums[:, COLUMN_INDEX[name]] = np.bincount(step[known], sizes[sizes >= 0], count)
        sums[:, COLUMN_INDEX[f"{name} known"]] = np.bincount(step[known], minlength=count)
    return sums
