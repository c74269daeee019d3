"""The rows of a comparison: one measure of several recordings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

Value = str | int | float | None

# Two runs of the same job differ by up to this share.
NOISE = 0.05


class Unit(Enum):
    """The unit of a measure's values."""

    TEXT = "text"
    COUNT = "count"
    SECONDS = "seconds"
    BYTES = "bytes"
    RATE = "per second"


@dataclass(frozen=True, slots=True)
class Measure:
    """One row, with a value per recording; None where it was not recorded."""

    section: str
    name: str
    unit: Unit
    values: tuple[Value, ...]

    @property
    def is_different(self) -> bool:
        """Whether the values differ; measurements have to differ by more than ``NOISE``."""
        if self.unit in (Unit.TEXT, Unit.COUNT) or None in self.values:
            return len(set(self.values)) > 1
        numbers = [float(value) for value in self.values if value is not None]
        return max(numbers) - min(numbers) > NOISE * max(map(abs, numbers))

    def compute_factor(self, index: int) -> float:
        """Return a recording's value divided by the first recording's; NaN where that is undefined."""
        first, value = self.values[0], self.values[index]
        if self.unit in (Unit.TEXT, Unit.COUNT) or not isinstance(value, int | float):
            return math.nan
        return value / first if isinstance(first, int | float) and first else math.nan


@dataclass(frozen=True, slots=True)
class Comparison:
    """Recordings side by side: rows grouped by section, in reading order."""

    names: tuple[str, ...]
    measures: tuple[Measure, ...]

    @property
    def different_measures(self) -> tuple[Measure, ...]:
        """The rows in which the recordings differ."""
        return tuple(measure for measure in self.measures if measure.is_different)
