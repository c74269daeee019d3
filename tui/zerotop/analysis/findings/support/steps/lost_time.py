"""Changes of pace that cost enough time to report. A shorter change that ends again is noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from zerotop.analysis.stats.change_points import LEVEL_STEPS, SHIFT_SHARE
from zerotop.recording.samples import Floats, Rows
from zerotop.recording.steps.step_dtype import sum_training_s

T = TypeVar("T")

# The share of the time from which a slowdown is worth telling.
LEAST_COST = 0.03
# Seconds that are reported however short the training was: recordings of a few seconds come from tests.
_LEAST_S = 0.1
# A loss of one second is reported, or of this share of the training so far if that is less.
_NOTABLE_S, _NOTABLE_SHARE = 1.0, 0.02
# In a long training a second is nothing. Half a minute is reported however long it is, so that users learn of it.
_LONG_SHARE, _MOST_S = 0.005, 30.0


def count_rarer_steps(period: float, share: float, most: float) -> int:
    """Return after how many steps, a round number, to do what takes a share of the time after each ``period`` of them.

    It then takes less than ``most`` of the time.
    """
    steps = max(1.0, period * share / (1 - share) * (1 - most) / most)
    tens: int = 10 ** math.floor(math.log10(steps))
    return next(tens * times for times in (1, 2, 5, 10) if tens * times >= steps)


class Level(NamedTuple):
    """A new level of the iteration time, and the level before it."""

    first_step: int
    last_step: int  # with which the change was found
    before_s: float
    after_s: float


def await_notable(
    waiting: list[T], steps: Rows, fresh: Iterable[T], find_level: Callable[[T], Level]
) -> Iterator[tuple[T, int]]:
    """Yield changes once they have cost, or saved, a notable time, and when they had (unix nanoseconds).

    A change is dropped if the next one comes before that. If the next one leads back to the old level, it is dropped too.
    ``waiting``: the changes that have not cost enough yet, which are kept there. ``steps``: those of the rank from which
    the changes are read.
    """
    for one in fresh:
        level = find_level(one)
        yield from _take_notable(waiting, steps, find_level, level.last_step)
        is_back = any(_is_alike(find_level(other).before_s, level.after_s) for other in waiting)
        waiting[:] = [] if is_back else [one]
    yield from _take_notable(waiting, steps, find_level, None)


def has_cost_little(steps: Rows, first_step: int, until_step: int, share: float) -> bool:
    """Whether a slowdown that has ended, and took a share of each iteration, cost little of the training up to now.

    ``steps``: all that are known of a rank.
    """
    slow = steps[slice(*np.searchsorted(steps["step"], (first_step, until_step + 1)))]
    lost_s = share * float(np.nansum(slow["iteration_s"] * slow["steps"]))
    return lost_s < min(LEAST_COST * sum_training_s(steps), _MOST_S)


def _is_alike(before_s: float, after_s: float) -> bool:
    return abs(after_s - before_s) < SHIFT_SHARE * before_s


def _take_notable(
    waiting: list[T], steps: Rows, find_level: Callable[[T], Level], until_step: int | None
) -> Iterator[tuple[T, int]]:
    for one in waiting[:]:
        level = find_level(one)
        index = _find_notable(steps, level, until_step)
        if index is not None:
            waiting.remove(one)
            if _is_in_force(steps, level, index):
                yield one, int(steps["end_unix_ns"][index])


def _is_in_force(steps: Rows, level: Level, index: int) -> bool:
    """Whether recent steps up to this index still take more or less time than those before the change."""
    latest = steps[: index + 1][-LEVEL_STEPS:]
    seconds = float(np.nanmedian(latest["iteration_s"][latest["step"] >= level.first_step]))
    is_longer = level.after_s > level.before_s
    return (seconds > level.before_s) == is_longer and not _is_alike(level.before_s, seconds)


def _find_notable(steps: Rows, level: Level, until_step: int | None) -> int | None:
    """Return the index of the step with which the cost becomes notable; None if it does not up to ``until_step``."""
    begin, last = np.searchsorted(steps["step"], (level.first_step, level.last_step)).tolist()
    end = len(steps) if until_step is None else int(np.searchsorted(steps["step"], until_step, "right"))
    seconds = np.nan_to_num(steps["iteration_s"][:end])
    change = level.after_s - level.before_s
    lost = np.clip((seconds[begin:] - level.before_s) * np.sign(change), 0.0, abs(change)) * steps["steps"][begin:end]
    trained = np.cumsum(seconds * steps["steps"][:end])[begin:]
    notable = np.flatnonzero(np.cumsum(lost) >= _compute_notable_s(trained))
    notable = notable[notable >= last - begin]
    return begin + int(notable[0]) if len(notable) else None


def _compute_notable_s(trained_s: Floats) -> Floats:
    """Return the lost seconds that are worth a finding after this training time."""
    share = np.maximum(np.minimum(_NOTABLE_S, _NOTABLE_SHARE * trained_s), _LONG_SHARE * trained_s)
    return np.asarray(np.clip(share, _LEAST_S, _MOST_S), np.float64)
