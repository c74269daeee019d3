"""What the spans of a step add up to."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop_probe.recording.tables import EVAL, PHASE_CODE, PHASES

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Columns that add up the host time of phases.
DURATIONS = {
    "data_s": ("data",),
    "forward_s": ("forward",),
    "backward_s": ("backward",),
    "step_s": ("step",),
    "optimizer_s": ("optimizer", "cpu_optimizer"),
    "eval_s": ("eval",),
    "checkpoint_s": ("checkpoint_save", "checkpoint_load"),
}
# What forwards say of their micro-batch.
SIZES = ("rows", "tokens")
# All that is added up: nothing, nanoseconds, counts, and of how many forwards each size is known.
SUMS = ("", *DURATIONS, "micro_steps", *SIZES, *(f"{name} known" for name in SIZES))
PLACE = {name: place for place, name in enumerate(SUMS)}
# A phase of these counts only when it is outermost: within an evaluation it is the evaluation's time.
_OUTERMOST = ("data", "eval", "checkpoint_save", "checkpoint_load")


def _places() -> NDArray[np.intp]:
    """Where in SUMS a span's time goes, at 2 * phase + (1 where nested); the last phase stands for unknown newer ones."""
    places = np.zeros((len(PHASES) + 1, 2), np.intp)
    for column, names in DURATIONS.items():
        for name in names:
            places[PHASE_CODE[name]] = PLACE[column], 0 if name in _OUTERMOST else PLACE[column]
    return places.ravel()


_PLACES = _places()


def add_up(spans: NDArray[Any], closing: Ints, of: Ints) -> Floats:
    """What the spans of processes up to each closing one add up to; of each process the last is of a step in progress.

    ``of`` has the place of each span's process, ascending; the shape is (closing + processes, SUMS).

    Nanoseconds are whole numbers, which floats hold exactly for 100 days: the order of adding does not matter.
    """
    begins = np.zeros(len(spans) + 1, np.intp)
    begins[closing + 1] = 1
    step = begins[:-1].cumsum() + of
    count, width = len(closing) + int(of[-1]) + 1, len(SUMS)
    place = _PLACES.take(np.minimum(spans["phase"], len(PHASES)) * np.uint16(2) + (spans["depth"] > 0))
    place[spans["flags"] & EVAL != 0] = 0
    duration = spans["end_ns"] - spans["begin_ns"]
    sums = np.asarray(np.bincount(step * width + place, duration, count * width), np.float64).reshape(count, width)
    sums[:, PLACE["micro_steps"]] = np.bincount(step[place == PLACE["backward_s"]], minlength=count)
    forward = np.flatnonzero(place == PLACE["forward_s"])
    for name in SIZES:
        known = forward[(sizes := spans[name][forward]) >= 0]
        sums[:, PLACE[name]] = np.bincount(step[known], sizes[sizes >= 0], count)
        sums[:, PLACE[f"{name} known"]] = np.bincount(step[known], minlength=count)
    return sums
