"""The search for the largest value that fits: a bisection that starts where the memory is predicted to be full."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from zerotop.analysis.stats.knee import KneeFit, fit_knee
from zerotop.session.sweeps import Value

# A line through two points in the flat part would predict far too much: so many times the largest measured at most.
_FARTHEST = 4.0


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
    expected: float | None = None  # value at which memory is full, by what was measured so far


@dataclass
class LargestSearch:
    """Chooses the next value to try, from ascending ``values``.

    Attributes:
        limit_bytes: memory that PyTorch can have on one GPU; None if unknown, then the search only halves.
        predicted: value at which memory should be full, before anything is measured.
    """

    values: Sequence[int]
    limit_bytes: float | None = None
    predicted: float | None = None
    largest_fitting: int = -1  # index; -1 while none is known to fit
    smallest_failing: int = -1  # index; -1 while none is known to fail
    _measured: dict[int, float] = field(default_factory=dict)  # bytes by value
    _steps_up: int = 0  # tries in a row that were just one above the largest that fits

    def note_fitting(self, value: int, size: float | None) -> None:
        """Note that a value fits, with the memory that it took."""
        self.largest_fitting = max(self.largest_fitting, self.values.index(value))
        if size is not None:
            self._measured[value] = size

    def note_failing(self, value: int) -> None:
        """Note that a value does not fit."""
        index = self.values.index(value)
        self.smallest_failing = index if self.smallest_failing < 0 else min(index, self.smallest_failing)

    @property
    def fit(self) -> KneeFit | None:
        """Memory over the value, as measured so far."""
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

    def predict_largest(self) -> float | None:
        """Return the value at which memory is full: by the line once two values are measured."""
        fit = self.fit
        if fit is None or self.limit_bytes is None:
            return self.predicted
        full = fit.solve(self.limit_bytes)
        return self.predicted if full is None else min(full, _FARTHEST * max(self._measured))

    def choose_next(self) -> int | None:
        """Return the value to try next; None when the largest is known."""
        if self.is_over:
            return None
        low, high = self.largest_fitting + 1, self._end - 1
        predicted = self.predict_largest()
        middle = (low + high) // 2
        if predicted is None or self._steps_up >= 2:
            index, self._steps_up = middle, 0
        else:
            wanted = bisect_right(self.values, predicted) - 1
            index = max(low, min(high, wanted))
            if self.smallest_failing >= 0 and index == high > low and self.fit is None:
                index = middle  # the prediction has failed, and nothing better is known
            self._steps_up = self._steps_up + 1 if index == low and low > 0 else 0
        return self.values[index]
