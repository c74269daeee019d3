"""Notices about what trains, or does not: which optimizers make an iteration, and jobs without any."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zerotop.analysis.engine import LOOP, read_first_engine
from zerotop.analysis.formatting import join_words, pluralize
from zerotop.recording.moments.at import At
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import PHASE_CODE

# More optimizers than these are not named.
_MOST_NAMED = 4
_TRAINED_NOTHING = (
    "No training was recorded: no process with the probe created a DeepSpeed engine, or called backward() and stepped a"
    " PyTorch optimizer."
)
# An optimizer that has not stepped after this many backwards is worth a notice; accumulation over more is rare. These are
# searched in the first records.
_MANY_BACKWARDS, _FIRST_SPANS = 100, 2000
_BACKWARD, _STEP = PHASE_CODE["backward"], PHASE_CODE["step"]
_NO_OPTIMIZER = "This loop has no optimizer of PyTorch: its forwards and backwards are shown, but no steps."


def describe_training(at: At) -> list[str]:
    """Return the sentences that hold at a moment in unix time."""
    engine = read_first_engine(at)
    if not engine:
        is_known = _has_ended_untrained(at) and not at.events_of(events.ProbeMissing)
        return [_TRAINED_NOTHING] if is_known else []
    if engine.kind != LOOP:
        return []
    if not engine.optimizer:
        return [_NO_OPTIMIZER]
    if (backwards := _count_backwards_without_step(at)) >= _MANY_BACKWARDS:
        return [
            f"None of {backwards:,} backwards was followed by a step of {engine.optimizer} so far:"
            " without steps there are no iterations."
        ]
    reported = at.events_of(events.Optimizers)
    return _describe_rule(min(reversed(reported), key=lambda event: event.writer.rank).optimizers) if reported else []


def _count_backwards_without_step(at: At) -> int:
    """Return the backwards of the loop's first rank until a moment, or among its first records; 0 with a step."""
    if not at.sources["spans"]:
        return 0
    source = at.sources["spans"][0]
    spans = source.array[:_FIRST_SPANS]
    phases = spans["phase"][spans["end_ns"] + source.offset_ns <= at.cursor_ns]
    return 0 if np.any(phases == _STEP) else int(np.count_nonzero(phases == _BACKWARD))


def _has_ended_untrained(at: At) -> bool:
    """Return whether a job that zerotop started has ended without a report of any rank."""
    if not at.events_of(events.JobStarted) or at.events_of(events.Hello):
        return False
    return bool(at.events_of(events.JobEnded))


def _describe_rule(optimizers: Sequence[events.SteppedOptimizer]) -> list[str]:
    counting = [optimizer for optimizer in optimizers if optimizer.counts]
    # One without parameters never counts, and changes nothing.
    rare = [optimizer for optimizer in optimizers if not optimizer.counts and optimizer.parameters != 0]
    sentences = []
    if len(counting) > 1:
        sentences.append(f"An iteration ends when {_list_optimizers(counting)} have each stepped since the last one.")
    elif rare and counting:
        sentences.append(f"An iteration is a step of {_list_optimizers(counting)}.")
    if rare:
        verb = "does" if len(rare) == 1 else "do"
        sentences.append(f"{_list_optimizers(rare)} {verb} not count: the others have stepped many times meanwhile.")
    return [" ".join(sentences)] if sentences else []


def _list_optimizers(optimizers: Sequence[events.SteppedOptimizer]) -> str:
    if len(optimizers) > _MOST_NAMED:
        return f"{len(optimizers)} optimizers"
    names = [f"{optimizer.class_} ({_format_count(optimizer.parameters or 0)})" for optimizer in optimizers]
    return join_words(names)


def _format_count(parameters: int) -> str:
    return f"{parameters:,} {pluralize(parameters, 'parameter')}"
