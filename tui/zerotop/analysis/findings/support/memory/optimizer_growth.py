"""The state of an optimizer that holds most of what a process's memory grew by."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support.memory.growing_readings import GrowthStretch
from zerotop.analysis.memory.tensor_inventory import AFTER_UPDATE, NEXT_FORWARD, OPTIMIZER_STATE, find_step
from zerotop_probe.recording.event_values import AGAIN
from zerotop_probe.recording.events import Tensors

_SETTLED = (AFTER_UPDATE, NEXT_FORWARD, AGAIN)  # counts when there is a state
# The part of the growth that the state must have, and may have; and of its own growth, that of a single reading.
_LEAST_SHARE, _MOST_SHARE, _LARGEST_RISE = 0.5, 1.5, 0.5


class StateGrowth(NamedTuple):
    """An optimizer's state in two counts of the tensors."""

    optimizer: str  # class; empty if unknown
    before_bytes: int
    after_bytes: int
    since_step: int
    until_step: int
    known_ns: int


def find_state_growth(stretch: GrowthStretch, deadline_ns: int) -> StateGrowth | None:
    """Return the growth of the optimizer's state that explains a stretch, from the last counts up to its end.

    A later one, up to the deadline, counts where there is none.
    """
    bases: dict[int, Tensors] = {}  # by engine
    found: StateGrowth | None = None
    for event in stretch.process.events_of(Tensors):
        if event.unix_ns > deadline_ns:
            break
        if event.when not in _SETTLED or not event.device or OPTIMIZER_STATE not in event.device:
            continue
        base = bases.get(event.engine or 0)
        if base is None or find_step(event) <= stretch.before_step:
            bases[event.engine or 0] = event
        elif found is None or find_step(event) <= int(stretch.steps[-1]):
            found = _compare(stretch, base, event) or found
    return found


def _compare(stretch: GrowthStretch, before: Tensors, after: Tensors) -> StateGrowth | None:
    (low, since), (high, until) = ((int((one.device or {})[OPTIMIZER_STATE]), find_step(one)) for one in (before, after))
    inside = (stretch.steps >= since) & (stretch.steps <= until)
    held = stretch.held[inside]
    if len(held) < 2 or high <= low:
        return None
    grown = stretch.slope * (until - max(since, stretch.before_step))
    if not _LEAST_SHARE * grown <= high - low <= _MOST_SHARE * grown or np.diff(held).max() > _LARGEST_RISE * (high - low):
        return None
    return StateGrowth(_name_optimizer(stretch, before, after), low, high, since, until, after.unix_ns)


def _name_optimizer(stretch: GrowthStretch, before: Tensors, after: Tensors) -> str:
    """Return the class of the one that grew most."""
    pairs = list(zip(before.optimizer_states or (), after.optimizer_states or (), strict=False))
    if pairs:
        return str(max(pairs, key=lambda pair: pair[1].device - pair[0].device)[1].class_)
    return stretch.process.engine.inner_optimizer or ""
