"""The values of several recordings side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

Value = str | int | float | None

# Below this two runs of the same job differ too.
NOISE = 0.05


class Unit(Enum):
    """What a value is; in it, as everywhere in data."""

    TEXT = "text"
    COUNT = "count"
    SECONDS = "seconds"
    BYTES = "bytes"
    RATE = "per second"


@dataclass(frozen=True, slots=True)
class Measure:
    """One row: the same thing of each recording; None where it was not recorded."""

    section: str
    name: str
    unit: Unit
    values: tuple[Value, ...]

    @property
    def is_different(self) -> bool:
        """Whether they are not all the same; of what was measured, by more than noise."""
        if self.unit in (Unit.TEXT, Unit.COUNT) or None in self.values:
            return len(set(self.values)) > 1
        numbers = [float(value) for value in self.values if value is not None]
        return max(numbers) - min(numbers) > NOISE * max(map(abs, numbers))

    def compute_factor(self, place: int) -> float:
        """How many times the first recording's value this one's is; NaN where that says nothing."""
        first, this = self.values[0], self.values[place]
        if self.unit in (Unit.TEXT, Unit.COUNT) or not isinstance(this, int | float):
            return math.nan
        return this / first if isinstance(first, int | float) and first else math.nan


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows by section, in the order in which they are to be read."""

    names: tuple[str, ...]
    measures: tuple[Measure, ...]

    @property
    def different_measures(self) -> tuple[Measure, ...]:
        """Those rows in which the recordings differ."""
        return tuple(measure for measure in self.measures if measure.is_different)
