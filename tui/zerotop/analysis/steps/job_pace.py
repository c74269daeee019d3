"""The pace of a whole job: its usual iteration, and its tokens per second.

Tokens of many steps, some of them only counted.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.samples import Floats, Ints, Rows
from zerotop.recording.steps.missing_steps import find_recorded
from zerotop.recording.steps.step_dtype import sum_training_s

Chosen = slice | NDArray[np.bool_]
"""Which of some steps."""
# The share of a number of tokens that may depend on when the batch changed.
_MOST_DOUBT = 0.03
_LEAST_OVERLAP = 0.95  # from which on steps on their slowest ranks are as long as those of the job
_MOST_RECORDED = 0.98  # of the steps, from which on the time of all is known


def estimate_tokens(rows: Rows, tokens: Ints, chosen: Chosen = slice(None)) -> float:
    """Return the tokens of the recorded steps among the chosen ones (STEP_DTYPE), each with ``tokens``.

    A counted step, whose tokens are unknown, counts as between the last step before and the first one after it whose tokens
    are known. NaN where rows or the length of sequences changed between those, and in so many steps that the sum would be a
    guess. Where lengths differ from step to step, as those of padded batches, it has as many as the known steps in the same
    time: these may by chance be short ones. NaN where their speeds differ too much to tell.
    """
    known = np.flatnonzero(tokens > 0)
    weights = (rows["steps"] * find_recorded(rows))[chosen]
    if not len(known) or not rows["counted"].any():
        return float((np.maximum(tokens, 0)[chosen] * weights).sum())
    places = np.arange(len(rows))
    estimated = np.interp(places, known, tokens[known])
    at = np.maximum(0, np.searchsorted(known, places, "right") - 1)
    to = np.minimum(len(known) - 1, np.searchsorted(known, places))
    before, after = known[at], known[to]
    same_before = tokens[known[np.maximum(0, at - 1)]] == tokens[before]
    same_after = tokens[known[np.minimum(len(known) - 1, to + 1)]] == tokens[after]
    has_changed = (rows["rows"][after] != rows["rows"][before]) | (same_before & same_after)
    doubts = np.abs(tokens[after] - tokens[before]) / 2 * has_changed
    is_varied = (tokens[after] != tokens[before]) & ~has_changed
    if is_varied.any():
        pace, doubt = _measure_known_pace(rows[known], tokens[known])
        seconds = np.nan_to_num(rows["iteration_s"])
        estimated, doubts = np.where(is_varied, pace * seconds, estimated), np.where(is_varied, doubt * seconds, doubts)
    total = float((estimated[chosen] * weights).sum())
    return total if float((doubts[chosen] * weights).sum()) <= _MOST_DOUBT * total else math.nan


def _measure_known_pace(rows: Rows, tokens: Ints) -> tuple[float, float]:
    """Return the tokens per second of steps with known tokens, and its standard error.

    Without the first step, which starts up and compiles.
    """
    rows, tokens = (rows[1:], tokens[1:]) if len(rows) > 1 and rows["step"][0] == 0 else (rows, tokens)
    is_timed = find_recorded(rows)
    seconds, counts = rows["iteration_s"][is_timed], tokens[is_timed].astype(np.float64)
    if len(seconds) < 2 or not seconds.sum() > 0:
        return math.nan, math.nan
    pace = float(counts.sum() / seconds.sum())
    spread = float(np.sqrt(np.square(counts - pace * seconds).sum() * len(seconds) / (len(seconds) - 1)))
    return pace, spread / float(seconds.sum())


def find_usual(iteration_s: Floats, skipped: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the iterations that show the usual time: the recorded ones with an update, or all if none had one.

    Without the optimizer a skipped step can be several times shorter than a real one.
    """
    recorded: NDArray[np.bool_] = ~np.isnan(iteration_s)
    updating: NDArray[np.bool_] = recorded & ~skipped
    return updating if updating.any() else recorded


def measure_iteration(rows: Rows) -> float:
    """Return the median seconds of the usual iterations of a job (STEP_DTYPE); NaN without any.

    Where ranks do not wait for each other in each step, the slowest one of each takes longer than a step of the job: then
    from the end of a step to the next one's.
    """
    usual = find_usual(rows["iteration_s"], rows["skipped"])
    if not usual.any():
        return math.nan
    if measure_overlap(rows) < _LEAST_OVERLAP:
        ends = np.maximum.accumulate(rows["end_unix_ns"])
        is_next = usual[1:] & find_recorded(rows)[:-1] & (np.diff(rows["step"]) == rows["steps"][1:])
        is_next &= rows["eval_s"][1:] + rows["checkpoint_s"][1:] == 0
        if is_next.any():
            return float(np.median((np.diff(ends) / np.maximum(1, rows["steps"][1:]))[is_next])) / 1e9
    return float(np.median(rows["iteration_s"][usual]))


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


def measure_token_rate(rows: Rows, token_counts: Ints, chosen: Chosen | None = None) -> float:
    """Return the mean tokens per second of chosen iterations, given the tokens of each; NaN where unknown.

    ``rows``: all steps, which tell the tokens of those that were only counted. ``chosen``: None for the usual iterations, as
    in :func:`measure_iteration`.
    """
    chosen = find_usual(rows["iteration_s"], rows["skipped"]) if chosen is None else chosen
    steps = rows[chosen]
    seconds = float(np.nansum(steps["iteration_s"] * steps["steps"]))
    seconds *= measure_overlap(steps if isinstance(chosen, slice) else rows)
    if not seconds > 0 or not (token_counts[chosen] > 0).any():
        return math.nan
    tokens = estimate_tokens(rows, token_counts, chosen)
    return tokens / seconds if tokens > 0 else math.nan


def measure_whole_step(rows: Rows) -> float:
    """Return the seconds of a step over all the time, with evaluation, checkpoints and pauses between iterations.

    NaN where steps were not recorded.
    """
    count = int(rows["steps"].sum())
    if not count or int(rows["steps"][find_recorded(rows)].sum()) < _MOST_RECORDED * count:
        return math.nan
    lasted_s = float(rows["end_unix_ns"].max() - rows["begin_unix_ns"].min()) / 1e9
    return lasted_s / count if lasted_s > 0 else math.nan


def measure_whole_token_rate(rows: Rows, token_counts: Ints) -> float:
    """Return the tokens per second over all the time, as :func:`measure_whole_step`; NaN where unknown."""
    tokens, seconds = estimate_tokens(rows, token_counts), measure_whole_step(rows) * int(rows["steps"].sum())
    return tokens / seconds if tokens > 0 and seconds > 0 else math.nan
