"""The columns of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop_probe.recording.tables import UNKNOWN

STEP_DTYPE = np.dtype(
    [
        ("rank", "<i4"),
        ("step", "<i8"),
        # From the end of the step before (the first: from its first phase) to the end of this one, without evaluation
        # and checkpoints. NaN where the step was not, or not completely, recorded: see ``missing_steps``.
        ("iteration_s", "<f8"),
        ("data_s", "<f8"),
        ("forward_s", "<f8"),
        ("backward_s", "<f8"),
        ("step_s", "<f8"),
        ("optimizer_s", "<f8"),  # the optimizer itself, on either device; part of step_s
        ("eval_s", "<f8"),
        ("checkpoint_s", "<f8"),
        ("stages_s", "<f8"),  # in a pipeline: receiving from and sending to other stages; NaN where folded
        ("micro_steps", "<i4"),
        # Of all its micro-batches; UNKNOWN where not recorded, as "micro_steps".
        ("rows", "<i8"),
        ("tokens", "<i8"),
        ("skipped", "?"),
        # The device was read only at its end, for a short step would pay too much for more: its peaks are exact, those of
        # its phases and the device's times are not recorded. False where folded.
        ("light", "?"),
        # Only its end was recorded: iteration_s, eval_s and checkpoint_s are as of any step, the times of all other phases
        # are NaN, counts and sizes UNKNOWN. A row for many steps is counted if all of them are.
        ("counted", "?"),
        # Exact where the allocator's own peak belongs to this step, else its highest sample. After counted steps the
        # peak of all of them is read once: the last one has it, the others are UNKNOWN.
        ("allocated_peak_bytes", "<i8"),
        ("reserved_peak_bytes", "<i8"),
        ("host_rss_bytes", "<i8"),  # the highest sampled
        ("host_held_bytes", "<i8"),  # likewise, without pages of files; as host_rss_bytes in older recordings
        ("nvml_process_bytes", "<i8"),  # the highest sampled
        ("begin_unix_ns", "<i8"),
        ("end_unix_ns", "<i8"),
        # Of very old steps, see `folded_steps`: the row stands for this many steps, of which "step" is the last one. Times,
        # rows, tokens and micro-steps are those of the mean step (of phases and counts: of those that were not counted);
        # "skipped": the updates of most steps were.
        ("steps", "<i4"),
    ]
)

MEMORY_COLUMNS = (
    *("allocated_peak_bytes", "reserved_peak_bytes"),
    *("host_rss_bytes", "host_held_bytes", "nvml_process_bytes"),
)
"""The columns of bytes."""
PHASE_COLUMNS = ("data_s", "forward_s", "backward_s", "step_s", "optimizer_s", "stages_s")
"""The columns that are NaN in a counted step."""
COUNT_COLUMNS = ("micro_steps", "rows", "tokens")
"""The columns that are UNKNOWN in a counted step."""


def has_phases(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Return for each step whether its phases were recorded (STEP_DTYPE)."""
    known: NDArray[np.bool_] = ~rows["counted"] & ~np.isnan(rows["iteration_s"])
    return known


def sum_training_s(rows: NDArray[Any]) -> float:
    """Return the seconds of all iterations, evaluations and checkpoints (STEP_DTYPE)."""
    return float(sum(np.nansum(rows[name] * rows["steps"]) for name in ("iteration_s", "eval_s", "checkpoint_s")))


def erase_phases(rows: NDArray[Any]) -> None:
    """Make the phases of counted steps unknown, and all measurements of phases (STEP_DTYPE)."""
    counted = rows["counted"]
    if counted.any():
        for name in PHASE_COLUMNS:
            rows[name][counted] = np.nan
        for name in COUNT_COLUMNS:
            rows[name][counted] = UNKNOWN
