"""Scales of value axes: readable units, round ticks, and no shrinking while somebody watches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from zerotop.ui.charts.columns import Floats
from zerotop.ui.drawing.formatting import choose_ticks, choose_time_unit
from zerotop.ui.drawing.units import get_units, giga_unit
from zerotop_probe.recording.metrics import BYTES, BYTES_PER_S, CORES, NUMBER, PERCENT, SECONDS, WATTS

_MIN_TOP, _MAX_TOP = 0.04, 5000.0  # limits of an axis in its unit, so that labels stay short


@dataclass(frozen=True)
class Scale:
    """A vertical axis from zero with ticks a whole number of rows apart.

    Attributes:
        unit: name of the unit of ``distance`` and ``top``.
        factor: how many units make one second, byte, watt, ...
        distance: between ticks, in units.
        top: value of the uppermost tick, in units.
        rows: height of the chart.
    """

    unit: str
    factor: float
    distance: float
    top: float
    rows: int

    @property
    def uppermost(self) -> float:
        """Value of the uppermost tick, in seconds, bytes, watts, ...: of a plot in the rows below it only."""
        return self.top / self.factor

    @property
    def highest(self) -> float:
        """Value at the upper edge of the chart, in seconds, bytes, watts, ..."""
        return self.uppermost * self.rows / max(1, self.count_plot_rows(self.rows))

    def tick_rows(self, height: int) -> dict[int, float]:
        """Map each row with a tick at its upper edge (0 is the uppermost) to the value there."""
        number = round(self.top / self.distance)
        if height < number:
            return {0: self.top}
        return {height - n * (self.count_plot_rows(height) // number): n * self.distance for n in range(1, number + 1)}

    def count_plot_rows(self, height: int) -> int:
        """Return how many of ``height`` rows are below the uppermost tick, so that all ticks are equally far apart."""
        number = round(self.top / self.distance)
        return height - height % number if height >= number else height


# (smallest value in SI, unit, size of the unit in SI), chosen so that no label has more than four characters.
_UNITS: dict[str, tuple[tuple[float, str, float], ...]] = {
    SECONDS: (
        (0, "µs", 1e-6),
        (5e-4, "ms", 1e-3),
        (0.5, "s", 1),
        (300, "min", 60),
        (18000, "h", 3600),
        (1.8e7, "d", 86400),
    ),
    BYTES_PER_S: ((0, "kB/s", 1e3), (1e5, "MB/s", 1e6), (1e8, "GB/s", 1e9), (5e12, "TB/s", 1e12)),
    WATTS: ((0, WATTS, 1), (5000, "kW", 1e3), (5e6, "MW", 1e6)),
    CORES: ((0, CORES, 1), (5000, "k cores", 1e3)),
    NUMBER: (
        (0, "e-9", 1e-9),
        (5e-7, "e-6", 1e-6),
        (5e-4, "e-3", 1e-3),
        (0.1, NUMBER, 1),
        (5000, "k", 1e3),
        (5e6, "M", 1e6),
        (5e9, "G", 1e9),
    ),
}
_DEFAULT_UNITS = {SECONDS: ("s", 1.0), NUMBER: (NUMBER, 1.0), BYTES_PER_S: ("GB/s", 1e9)}  # of a chart without values


def choose_scale(kind: str, largest: float, height: int) -> Scale:
    """Return a scale with ticks 1, 2 or 5 times a power of ten apart for a chart of ``height`` rows.

    ``largest`` is in SI units. Give ``highest`` of the scale to the ``plot_`` functions as their ``top``. Without a positive
    finite value the axis ends at one.
    """
    rows = max(1, height)
    if kind == PERCENT:
        return Scale("%", 1.0, 25.0 if height >= 8 else 50.0 if height >= 2 else 100.0, 100.0, rows)
    if not 0 < largest < math.inf:
        unit, size = get_units().sizes.giga if kind == BYTES else _DEFAULT_UNITS.get(kind, _list_units(kind)[0][1:])
        return Scale(unit, 1 / size, 1.0, 1.0, rows)
    unit, size = next((unit, size) for least, unit, size in reversed(_list_units(kind)) if largest >= least)
    top = min(max(largest / size, _MIN_TOP), _MAX_TOP)
    return Scale(unit, 1 / size, *choose_ticks(top, 1 if height < 2 else _count_ticks(height)), rows)


def choose_memory_scale(size: float, height: int) -> Scale:
    """Return a scale in GiB or GB, whichever is set, for amounts up to ``size`` bytes."""
    unit = giga_unit()
    return Scale(
        unit.name, 1 / unit.bytes, *choose_ticks(max(size / unit.bytes, _MIN_TOP), _count_ticks(height)), max(1, height)
    )


def choose_time_scale(seconds: Floats, height: int) -> Scale:
    """Return a scale for these durations.

    A few durations much longer than the others, such as a first step that compiles, do not count: they are to be clipped.
    """
    seconds = seconds[np.isfinite(seconds)]
    longest = float(seconds.max()) if len(seconds) else 0.0
    if len(seconds) >= 8:
        usual = float(np.quantile(seconds, 0.9))
        longest = usual * 1.25 if longest > 2 * usual else longest
    unit, factor = choose_time_unit(longest)
    ticks = choose_ticks(longest * factor, 4 if height >= 8 else 3 if height >= 5 else 2)
    return Scale(unit, factor, *ticks, max(1, height))


def _count_ticks(height: int) -> int:
    return 4 if height >= 8 else 3 if height >= 6 else 2


def _list_units(kind: str) -> tuple[tuple[float, str, float], ...]:
    if kind != BYTES:
        return _UNITS.get(kind, ((0, kind, 1),))
    kilo, mega, giga, tera = get_units().sizes
    return (0, *kilo), (mega.bytes / 10, *mega), (giga.bytes / 10, *giga), (5000 * giga.bytes, *tera)


class GrowingScales:
    """The largest value of each chart so far, so that its scale grows and never shrinks.

    Clear it when the charts show something else: another time range, another rank.
    """

    def __init__(self) -> None:
        self._largest: dict[str, float] = {}

    def track_largest(self, chart: str, value: float) -> float:
        """Return the largest of ``value`` and all earlier values of this chart, without NaN and infinity."""
        before = self._largest.get(chart, 0.0)
        if math.isfinite(value) and value > before:
            self._largest[chart] = before = value
        return before

    def choose_scale(self, chart: str, kind: str, value: float, height: int) -> Scale:
        """Return a scale for all values of this chart so far."""
        return choose_scale(kind, self.track_largest(chart, value), height)

    def clear(self) -> None:
        """Forget all charts."""
        self._largest.clear()
