"""The search for the largest value that fits, in few runs: along a line of memory over the value, else by halves.

Before the first measurement the line comes from the formulas, or from what-if of a recording. A run that fits moves it, a
second one replaces it. A run that fails gives two numbers. The bytes that were allocated and requested when memory ran out
are a lower bound for its value: if the line says less, it is wrong. The bytes that PyTorch had reserved in blocks too small
for the request are missing to larger values in proportion, and are added to the line.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from zerotop.analysis.formatting import format_bytes
from zerotop.analysis.stats.knee import KneeFit, fit_knee
from zerotop.analysis.sweeps.settings import ALLOCATOR
from zerotop.recording.sweeps import Value

EXPANDABLE = "expandable_segments:True"
"""The allocator setting that avoids most fragmentation."""

# A line through two points in the flat part would predict far too much. The limit is this many times the largest measured.
_FARTHEST = 4.0
# A line that says less than this share of what a failed run had and requested is wrong.
_AGREEMENT = 0.98


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes over the searched value."""

    slope: float
    intercept: float

    def predict(self, value: float) -> float:
        """Return the bytes at a value."""
        return self.slope * value + self.intercept


class SearchShortage(NamedTuple):
    """The memory of a run that failed for lack of it, in bytes."""

    needed_bytes: float  # allocated and requested
    unusable_bytes: float = 0.0  # reserved by PyTorch in blocks too small for the request


@dataclass(frozen=True, slots=True)
class LargestResult:
    """The largest value of one series, as far as it is known."""

    settings: Mapping[str, Value]  # of the series
    largest: int | None  # that is known to fit
    failing: int | None  # smallest that is known not to fit
    is_final: bool  # no value between the two is left
    predicted: float | None  # before anything was measured
    allocated_bytes: int | None  # at the largest
    runs: int
    problem: str = ""  # why the search ended early
    expected: float | None = None  # value at which memory is full, from the measurements so far
    line: Line | None = None  # allocated memory, from the measurements so far
    limit_bytes: float | None = None  # memory available to PyTorch on one GPU
    fragmented_bytes: int | None = None  # unused in blocks too small for the request, where that is why ``failing`` failed


def describe_fragmentation(results: Sequence[LargestResult], searched: str) -> list[str]:
    """Return a sentence for each series in which fragmentation ended the search, with the option that may allow more."""
    name = searched.replace("_", "-")
    sentences = []
    for result in results:
        if result.fragmented_bytes is None or EXPANDABLE in str(result.settings.get(ALLOCATOR, "")):
            continue
        sentences.append(
            f"{name} {result.failing:,} failed with {format_bytes(result.fragmented_bytes)} reserved but unused, in blocks"
            f" too small: --allocator {EXPANDABLE} may allow more."
        )
    return sentences


@dataclass
class LargestSearch:
    """Chooses the next value to try, from ascending ``values``.

    Attributes:
        limit_bytes: memory available to PyTorch on one GPU; None if unknown, then the search only halves.
        formula: memory by the formulas, before anything is measured.
        unusable_slope: bytes for each unit that are expected in blocks too small to use, until a run fails or two fit.
    """

    values: Sequence[int]
    limit_bytes: float | None = None
    formula: Line | None = None
    unusable_slope: float = 0.0
    largest_fitting: int = -1  # index; -1 while none is known to fit
    smallest_failing: int = -1  # index; -1 while none is known to fail
    _measured: dict[int, float] = field(default_factory=dict)  # bytes by value
    _shortages: dict[int, SearchShortage] = field(default_factory=dict)  # by value
    _width: int = 0  # values that were left when half of them had last been ruled out
    _tries: int = 0  # since then

    def note_fitting(self, value: int, size: float | None) -> None:
        """Note that a value fits, with the memory that it took."""
        self.largest_fitting = max(self.largest_fitting, self.values.index(value))
        if size is not None:
            self._measured[value] = size

    def note_failing(self, value: int, shortage: SearchShortage | None = None) -> None:
        """Note that a value does not fit."""
        index = self.values.index(value)
        self.smallest_failing = index if self.smallest_failing < 0 else min(index, self.smallest_failing)
        if shortage is not None:
            self._shortages[value] = shortage

    @property
    def fit(self) -> KneeFit | None:
        """Memory over the value, from the measurements so far."""
        pairs = sorted(self._measured.items())
        return fit_knee(np.array([x for x, _ in pairs], np.float64), np.array([y for _, y in pairs], np.float64))

    @property
    def is_over(self) -> bool:
        """Whether the largest value is known."""
        return self._end - self.largest_fitting <= 1

    @property
    def _end(self) -> int:
        """Index of the smallest value that is known not to fit, or beyond all."""
        return self.smallest_failing if self.smallest_failing >= 0 else len(self.values)

    @property
    def line(self) -> Line | None:
        """Memory over the value by the runs that fit, before two of them with the formulas' slope."""
        fit = self.fit
        if fit is not None and fit.slope > 0:
            return Line(fit.slope, fit.intercept)
        if self.formula is None or not self._measured:
            return self.formula
        largest = max(self._measured)
        return Line(self.formula.slope, self._measured[largest] - self.formula.slope * largest)

    def predict_largest(self) -> float | None:
        """Return the value at which memory is full; None where that is not known."""
        line = self._raise_line(self.line)
        if line is None or self.limit_bytes is None:
            return None
        slope = line.slope + self._measure_unusable()
        if slope <= 0:
            return None
        full = max(0.0, (self.limit_bytes - line.intercept) / slope)
        return min(full, _FARTHEST * max(self._measured)) if self._measured else full

    def _measure_unusable(self) -> float:
        """Return the bytes that fragmentation took for each unit, in the smallest value that failed."""
        value = min(self._shortages, default=None)
        if value is None:
            return self.unusable_slope if len(self._measured) < 2 else 0.0
        return self._shortages[value].unusable_bytes / value

    def _raise_line(self, line: Line | None) -> Line | None:
        """Return a line that says no less than failed runs had and requested, through the largest value that fits."""
        if not self._shortages or not (line is None or self._is_contradicted(line)):
            return line
        at = max(self._measured, default=0)
        start = self._measured[at] if at else line.intercept if line is not None else 0.0
        slopes = [(one.needed_bytes - start) / (value - at) for value, one in self._shortages.items() if value > at]
        slope = max([*slopes, line.slope if line is not None else 0.0])
        return Line(slope, start - slope * at)

    def _is_contradicted(self, line: Line) -> bool:
        """Return whether a failed run had and requested more than a line says."""
        return any(line.predict(value) < _AGREEMENT * one.needed_bytes for value, one in self._shortages.items())

    def choose_next(self) -> int | None:
        """Return the value to try next; None when the largest is known."""
        if self.is_over:
            return None
        index = self._choose_index(self.largest_fitting + 1, self._end - 1)
        return self.values[index]

    def _choose_index(self, low: int, high: int) -> int:
        """Return the index that is predicted, or the middle one after tries that did not rule out half of the values."""
        if 2 * (high - low + 1) <= self._width or not self._width:
            self._width, self._tries = high - low + 1, 0
        self._tries += 1
        middle, predicted, line = (low + high) // 2, self.predict_largest(), self.line
        most_tries = 3 if self.fit is not None else 2
        if predicted is None or self._tries > most_tries:
            return middle
        wanted = bisect_right(self.values, predicted) - 1
        has_failed = self.smallest_failing >= 0
        if has_failed and (line is None or self._is_contradicted(line)):
            wanted = min(middle, wanted)  # the value at which memory is full is less than predicted
        elif has_failed and wanted > high > low and self.fit is None:
            return middle  # the prediction has failed, and nothing better is known
        return max(low, min(high, wanted))
