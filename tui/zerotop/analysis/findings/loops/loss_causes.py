"""What came before a loss that became NaN or jumped: a skipped step, another batch, another phase of the training."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from zerotop.analysis.findings.support.evidence import Floats, Group, Rows
from zerotop.analysis.formatting import join_words
from zerotop.analysis.steps.logged_values import LoggedSeries
from zerotop.analysis.steps.training_changes import describe_changes

# Steps up to that of the loss in which something may have caused it.
_STEPS_BEFORE = 2
# Earlier steps whose batches are the usual ones.
_USUAL_STEPS = 50
# A batch, a learning rate and a gradient norm are others if they differ by these factors.
_BATCH_FACTOR, _RATE_FACTOR, _NORM_FACTOR = 1.1, 1.5, 5.0
# A rate that is too high takes some steps to make a loss infinite: so many of its last values count.
_RATE_VALUES = 5
# Logged values before that are the usual ones.
_USUAL_VALUES = 20
_PHASES = {"eval": "an evaluation", "checkpoint_save": "saving a checkpoint", "checkpoint_load": "loading a checkpoint"}


def describe_before(
    group: Group, step: int | None, time_ns: int, logged: dict[str, LoggedSeries], known_ns: int
) -> str | None:
    """Return in a sentence what came before a loss of ``step`` that was logged at ``time_ns``; None if nothing is known."""
    rows = group.lead.steps_until(known_ns)
    near = rows[(rows["step"] >= step - _STEPS_BEFORE) & (rows["step"] <= step)] if step is not None else rows[:0]
    found = [*_find_skipped(near), *_find_batch(rows, near), *_find_rate(logged, time_ns), *_find_norm(logged, time_ns)]
    if len(near):
        begin_ns, end_ns = int(near["begin_unix_ns"][0]), int(near["end_unix_ns"][-1])
        found += _find_phases(group, begin_ns, end_ns)
        changes = group.lead.find_changes(begin_ns, end_ns, known_ns)
        found += [describe_changes(changes)] if changes else []
    return join_words(found) or None


def _find_skipped(near: Rows) -> Iterator[str]:
    skipped = near["step"][near["skipped"]].tolist()
    if skipped:
        yield f"step {skipped[0]} was skipped because gradients overflowed"


def _find_batch(rows: Rows, near: Rows) -> Iterator[str]:
    if not len(near):
        return
    usual = rows[rows["step"] < near["step"][0]][-_USUAL_STEPS:]
    for column, unit in (("tokens", "tokens"), ("rows", "rows")):
        before, now = (some[column][some[column] > 0] for some in (usual, near))
        if not len(before) or not len(now):
            continue
        # Batches that vary are no news.
        low, high = float(before.min()), float(before.max())
        other = now[(now > high * _BATCH_FACTOR) | (now < low / _BATCH_FACTOR)]
        if len(other):
            step = int(near["step"][near[column] == other[0]][0])
            yield f"step {step} had {int(other[0]):,} {unit} instead of {int(np.median(before)):,}"
            return


def _find_rate(logged: dict[str, LoggedSeries], time_ns: int) -> Iterator[str]:
    before, now = _split_usual(logged, "learning_rate", time_ns)
    values = np.append(before, now)
    for index in range(len(values) - 1, max(0, len(values) - 1 - _RATE_VALUES), -1):
        low, high = float(values[index - 1]), float(values[index])
        if low > 0 and max(low * _RATE_FACTOR, float(values[:index].max())) < high <= now:
            yield f"the learning rate rose from {low:.3g} to {high:.3g}"
            return


def _find_norm(logged: dict[str, LoggedSeries], time_ns: int) -> Iterator[str]:
    before, now = _split_usual(logged, "grad_norm", time_ns)
    if not len(before):
        return
    usual = float(np.median(before))
    # The norm of the step before, if that of this one is not finite either.
    last = now if math.isfinite(now) else float(before[-1])
    if usual > 0 and last >= _NORM_FACTOR * usual and last > np.sort(before)[-2:][0] * 2:
        yield f"the gradient norm was {last:.3g} instead of {usual:.3g}"


def _split_usual(logged: dict[str, LoggedSeries], name: str, time_ns: int) -> tuple[Floats, float]:
    """Return the finite values before, and the last one at a time, which may be none of them; NaN without any."""
    if name not in logged:
        return np.empty(0), math.nan
    values = logged[name].until(time_ns).values[-_USUAL_VALUES - 1 :]
    before = values[:-1]
    return before[np.isfinite(before)], float(values[-1]) if len(values) else math.nan


def _find_phases(group: Group, begin_ns: int, end_ns: int) -> Iterator[str]:
    for phase, words in _PHASES.items():
        times = group.lead.read_rare_phases(phase).times
        if ((times >= begin_ns) & (times <= end_ns)).any():
            yield f"{words} ended"
