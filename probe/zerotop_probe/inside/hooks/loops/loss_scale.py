"""The loss scale of a ``GradScaler``, computed without reading it: on a GPU a read would wait for the device.

The rule is PyTorch's, documented for ``update()``: multiply by the backoff factor after a skipped step, by the growth factor
after ``growth_interval`` steps in a row that were not skipped.
"""

from __future__ import annotations

import math
import struct
from typing import Any


class LossScale:
    """The scale of one scaler. ``value`` is None if it can no longer be known."""

    def __init__(self, scaler: Any, *, is_new: bool) -> None:
        """``is_new``: the scaler has not been updated yet. Otherwise its scale is unknown until somebody sets it."""
        self._scaler = scaler
        self.value: float | None = float(scaler._init_scale) if is_new else None
        self._streak = int(scaler._init_growth_tracker)
        # Since the last update: whether a step was skipped, and whether that is unknown of one.
        self.was_skipped = False
        self.is_unclear = False

    def load(self, state: dict[str, Any]) -> None:
        """Follow ``load_state_dict``."""
        if state:
            self.value, self._streak = float(state["scale"]), int(state["_growth_tracker"])

    def update(self, new_scale: Any) -> None:
        """Follow ``update(new_scale)``."""
        if new_scale is not None:
            self.value = float(new_scale) if isinstance(new_scale, (int, float)) else None
        elif self.value is not None:
            self.value = self._follow_rule(self.value)
        self.was_skipped = self.is_unclear = False

    def _follow_rule(self, value: float) -> float | None:
        if self.was_skipped:
            self._streak = 0
            return _round(value * self._scaler.get_backoff_factor())
        if self.is_unclear:
            return None
        self._streak += 1
        if self._streak < self._scaler.get_growth_interval():
            return value
        self._streak = 0
        grown = _round(value * self._scaler.get_growth_factor())
        return grown if math.isfinite(grown) else value


def _round(value: float) -> float:
    """Return the nearest float32, in which PyTorch keeps the scale."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf
