"""Sums over the spans of each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.samples import Floats, Ints, Rows
from zerotop_probe.recording.tables import EVAL, OUTERMOST_PHASES, PHASE_CODE, PHASES, STEP_SUMS

# Columns of host time, and the phases summed in each.
DURATION_COLUMNS = {f"{name}_s": phases for name, phases in STEP_SUMS.items()}
STAGES_COLUMN = "stages_s"
"""Host time, too, but of outermost phases only, and unknown once steps are folded."""
_STAGES = ("stage_wait", "stage_send")
# Sizes of micro-batches, recorded with forwards.
SIZE_COLUMNS = ("rows", "tokens")
# All sums: dropped spans, nanoseconds, counts, and the number of forwards with each size.
SUM_COLUMNS = (
    "",
    *DURATION_COLUMNS,
    STAGES_COLUMN,
    "micro_steps",
    *SIZE_COLUMNS,
    *(f"{name} known" for name in SIZE_COLUMNS),
)
COLUMN_INDEX = {name: index for index, name in enumerate(SUM_COLUMNS)}


def _build_columns() -> NDArray[np.intp]:
    """Return the index into SUM_COLUMNS at 2 * phase + (1 if nested); the last phase stands for unknown newer ones."""
    columns = np.zeros((len(PHASES) + 1, 2), np.intp)
    for column, names in DURATION_COLUMNS.items():
        for name in names:
            columns[PHASE_CODE[name]] = COLUMN_INDEX[column], 0 if name in OUTERMOST_PHASES else COLUMN_INDEX[column]
    for name in _STAGES:
        columns[PHASE_CODE[name], 0] = COLUMN_INDEX[STAGES_COLUMN]
    return columns.ravel()


_SPAN_COLUMNS = _build_columns()


def sum_spans(spans: NDArray[Any], closing: Ints, process_indices: Ints) -> Floats:
    """Sum the spans of processes up to each closing one, and of each process's step in progress.

    Nanoseconds are whole numbers, exact in floats for 100 days: the order of adding does not matter.

    Args:
        closing: indices of the spans that end steps.
        process_indices: each span's process, ascending.

    Returns:
        Shape (closing + processes, SUM_COLUMNS); the last row of each process is its step in progress.
    """
    begins = np.zeros(len(spans) + 1, np.intp)
    begins[closing + 1] = 1
    step = begins[:-1].cumsum() + process_indices
    count, width = len(closing) + int(process_indices[-1]) + 1, len(SUM_COLUMNS)
    column = _SPAN_COLUMNS.take(np.minimum(spans["phase"], len(PHASES)) * np.uint16(2) + (spans["depth"] > 0))
    column[spans["flags"] & EVAL != 0] = 0
    duration = spans["end_ns"] - spans["begin_ns"]
    sums = np.asarray(np.bincount(step * width + column, duration, count * width), np.float64).reshape(count, width)
    sums[:, COLUMN_INDEX["micro_steps"]] = np.bincount(step[column == COLUMN_INDEX["backward_s"]], minlength=count)
    forward = np.flatnonzero(column == COLUMN_INDEX["forward_s"])
    for name in SIZE_COLUMNS:
        known = forward[(sizes := spans[name][forward]) >= 0]
        sums[:, COLUMN_INDEX[name]] = np.bincount(step[known], sizes[sizes >= 0], count)
        sums[:, COLUMN_INDEX[f"{name} known"]] = np.bincount(step[known], minlength=count)
    return sums


def add_times(rows: Rows, passed_ns: Ints, loading_ns: Floats | Ints, sums: Mapping[str, Floats | Ints]) -> None:
    """Fill in the iteration time and the columns of host time.

    Args:
        rows: steps.
        passed_ns: from the end of the step before to the end of each.
        loading_ns: time in loading checkpoints before the first phase.
        sums: nanoseconds of each column of DURATION_COLUMNS, and of STAGES_COLUMN if known.
    """
    rows["iteration_s"] = (passed_ns - sums["eval_s"] - sums["checkpoint_s"]) / 1e9 + loading_ns / 1e9
    for name in DURATION_COLUMNS:
        rows[name] = sums[name] / 1e9
    rows[STAGES_COLUMN] = sums[STAGES_COLUMN] / 1e9 if STAGES_COLUMN in sums else np.nan
