"""The pace of a whole job: its usual iteration, and its tokens per second."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.steps.token_counts import estimate_tokens
from zerotop.recording.samples import Floats, Ints, Rows
from zerotop.recording.steps.missing_steps import find_recorded


def find_usual(iteration_s: Floats, skipped: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the iterations that show the usual time: the recorded ones with an update, or all if none had one.

    Without the optimizer a skipped step can be several times shorter than a real one.
    """
    recorded: NDArray[np.bool_] = ~np.isnan(iteration_s)
    updating: NDArray[np.bool_] = recorded & ~skipped
    return updating if updating.any() else recorded


def measure_iteration(rows: Rows) -> float:
    """Return the median seconds of the usual iterations of a job (STEP_DTYPE); NaN without any."""
    usual = find_usual(rows["iteration_s"], rows["skipped"])
    return float(np.median(rows["iteration_s"][usual])) if usual.any() else math.nan


def measure_mean(rows: Rows) -> float:
    """Return the mean seconds of the recorded iterations; NaN without any."""
    recorded = find_recorded(rows)
    return float(rows["iteration_s"][recorded].mean()) if recorded.any() else math.nan


def measure_token_rate(rows: Rows, token_counts: Ints) -> float:
    """Return tokens per second over all recorded iterations, given the tokens of each; NaN where unknown."""
    recorded = find_recorded(rows)
    tokens, seconds = estimate_tokens(rows, token_counts), float((rows["iteration_s"] * rows["steps"])[recorded].sum())
    return tokens / seconds if tokens > 0 and seconds > 0 else math.nan
