"""Steps from records of the table FOLDED: steps whose spans and samples were deleted, singly or in blocks."""

from __future__ import annotations

import numpy as np

from zerotop.recording.samples import Ints, Rows
from zerotop.recording.steps.span_sums import DURATION_COLUMNS, add_times
from zerotop.recording.steps.step_dtype import COUNT_COLUMNS, MEMORY_COLUMNS, PHASE_COLUMNS, erase_phases
from zerotop.recording.steps.step_memory import measure_held_bytes
from zerotop.recording.table_files import Source
from zerotop_probe.recording.tables import FOLDED, UNKNOWN

FOLDED_DTYPE = np.dtype([(field.name, field.dtype) for field in FOLDED.fields])


def has_gaps(folded: Rows, last_step: int) -> bool:
    """Whether steps are missing or incomplete; ``last_step`` is the number of the step before the first record."""
    jumps = np.diff(folded["step"], prepend=last_step) > folded["steps"]
    return bool(jumps.any() or (folded["longest_ns"] == UNKNOWN).any())


def fill_rows(rows: Rows, folded: Rows, previous_ns: int, process: Source) -> None:
    """Fill rows of STEP_DTYPE, one a record; ``previous_ns`` is the end of the step before, on the writer's clock."""
    ends = folded["end_ns"]
    begins = np.append(np.int64(previous_ns), ends[:-1])
    rows["rank"] = process.rank
    rows["step"] = folded["step"]
    rows["begin_unix_ns"], rows["end_unix_ns"] = begins + process.offset_ns, ends + process.offset_ns
    sums = {column: folded[f"{column[:-2]}_ns"] for column in DURATION_COLUMNS}
    add_times(rows, ends - begins, folded["loading_ns"], sums)
    for name in (*COUNT_COLUMNS, *MEMORY_COLUMNS):
        rows[name] = measure_held_bytes(folded, "host_") if name == "host_held_bytes" else folded[name]
    rows["iteration_s"][folded["longest_ns"] == UNKNOWN] = np.nan
    steps = rows["steps"] = folded["steps"]
    phased = steps - _count_counted(folded)
    rows["light"], rows["counted"] = False, phased == 0
    rows["skipped"] = 2 * folded["skipped_steps"] > steps
    block = np.flatnonzero(steps > 1)
    if len(block):
        phased = np.maximum(1, phased[block])
        for name in ("iteration_s", *DURATION_COLUMNS):
            rows[name][block] /= phased if name in PHASE_COLUMNS else steps[block]
        for name in COUNT_COLUMNS:
            values = folded[name][block]
            rows[name][block] = np.where(values == UNKNOWN, UNKNOWN, np.rint(values / phased))
    erase_phases(rows)


def _count_counted(folded: Rows) -> Ints:
    """Return how many of the steps of each record were only counted; older recordings have none."""
    names = folded.dtype.names or ()
    counts: Ints = folded["counted_steps"] if "counted_steps" in names else np.zeros(len(folded), np.int64)
    return counts
