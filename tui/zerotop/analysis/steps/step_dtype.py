"""The columns of a step."""

from __future__ import annotations

import numpy as np

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
        ("micro_steps", "<i4"),
        # Of all its micro-batches; UNKNOWN where not recorded.
        ("rows", "<i8"),
        ("tokens", "<i8"),
        ("skipped", "?"),
        # The device was read only at its end, for a short step would pay too much for more: its peaks are exact, those of
        # its phases and the device's times are not recorded. False where folded.
        ("light", "?"),
        # Exact where the allocator's own peak belongs to this step, else its highest sample.
        ("allocated_peak_bytes", "<i8"),
        ("reserved_peak_bytes", "<i8"),
        ("host_rss_bytes", "<i8"),  # the highest sampled
        ("nvml_process_bytes", "<i8"),  # the highest sampled
        ("begin_unix_ns", "<i8"),
        ("end_unix_ns", "<i8"),
        # Of very old steps, see `folded_steps`: the row stands for this many steps, of which "step" is the last one. Times,
        # rows, tokens and micro-steps are those of the mean step; "skipped": the updates of most steps were.
        ("steps", "<i4"),
    ]
)

MEMORY_COLUMNS = ("allocated_peak_bytes", "reserved_peak_bytes", "host_rss_bytes", "nvml_process_bytes")
