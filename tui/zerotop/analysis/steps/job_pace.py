"""The pace of a whole job: its usual iteration, and its tokens per second.

Tokens of many steps, some of them only counted.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.samples import Floats, Ints, Rows
from zerotop.recording.steps.missing_steps import find_recorded


def estimate_tokens(rows: Rows, tokens: Ints) -> float:
    """Return the tokens of all steps recorded among some steps (STEP_DTYPE), each with ``tokens``.

    A counted step, whose tokens are unknown, counts with the average of the others.
    """
    weights = rows["steps"] * find_recorded(rows)
    known = weights[tokens > 0].sum()
    total = float((np.maximum(tokens, 0) * weights).sum())
    return total * float(weights.sum() / known) if known and rows["counted"].any() else total


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


def sum_training_s(steps: Rows) -> float:
    """Return the sum of iterations, evaluations and checkpoints (STEP_DTYPE), in seconds."""
    return float(sum(np.nansum(steps[name] * steps["steps"]) for name in ("iteration_s", "eval_s", "checkpoint_s")))


def measure_overlap(steps: Rows) -> float:
    """Return by what to multiply a sum over steps on their slowest ranks, so that it is not longer than the time they took.

    Where ranks wait for each other in different phases, the pause of one is the next iteration of another.
    """
    if not len(steps):
        return 1.0
    lasted_s = float(steps["end_unix_ns"].max() - steps["begin_unix_ns"].min()) / 1e9
    return min(1.0, lasted_s / max(sum_training_s(steps), 1e-9)) if lasted_s > 0 else 1.0


def measure_mean(rows: Rows) -> float:
    """Return the mean seconds of the recorded iterations; NaN without any."""
    recorded = find_recorded(rows)
    return float(rows["iteration_s"][recorded].mean()) * measure_overlap(rows) if recorded.any() else math.nan


def measure_token_rate(rows: Rows, token_counts: Ints) -> float:
    """Return tokens per second over all recorded iterations, given the tokens of each; NaN where unknown."""
    recorded = find_recorded(rows)
    tokens, seconds = estimate_tokens(rows, token_counts), float((rows["iteration_s"] * rows["steps"])[recorded].sum())
    seconds *= measure_overlap(rows)
    return tokens / seconds if tokens > 0 and seconds > 0 else math.nan
