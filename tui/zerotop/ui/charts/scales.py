"""Scales of value axes for each kind of quantity, and what keeps them from shrinking while somebody watches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from zerotop.ui.charts.step_axis import Scale
from zerotop.ui.drawing.formatting import choose_ticks
from zerotop.ui.drawing.units import get_units


@dataclass(frozen=True)
class FittedScale(Scale):
    """A scale for so many rows. Ticks stand whole rows apart, so that the chart may reach a little beyond the last one."""

    rows: int = 0

    @property
    def highest(self) -> float:
        """What the uppermost edge of the chart stands for, in what is measured."""
        return self.top / self.factor * self.rows / max(1, self.count_plot_rows(self.rows))


class Quantity(Enum):
    """What is measured, and in what."""

    PERCENT = "percent"  # 0 to 100, always all of it
    SECONDS = "seconds"
    BYTES = "bytes"
    BYTES_PER_S = "bytes per second"
    WATTS = "watts"
    CORES = "cores"
    NUMBER = "number"


# (from which value on, in SI; unit; what one of it is in SI), so that no label has more than four characters.
_UNITS: dict[Quantity, tuple[tuple[float, str, float], ...]] = {
    Quantity.SECONDS: (
        (0, "µs", 1e-6),
        (5e-4, "ms", 1e-3),
        (0.5, "s", 1),
        (300, "min", 60),
        (18000, "h", 3600),
        (1.8e7, "d", 86400),
    ),
    Quantity.BYTES_PER_S: ((0, "kB/s", 1e3), (1e5, "MB/s", 1e6), (1e8, "GB/s", 1e9), (5e12, "TB/s", 1e12)),
    Quantity.WATTS: ((0, "W", 1), (5000, "kW", 1e3), (5e6, "MW", 1e6)),
    Quantity.CORES: ((0, "cores", 1), (5000, "k cores", 1e3)),
    Quantity.NUMBER: ((0, "", 1), (5000, "k", 1e3), (5e6, "M", 1e6), (5e9, "G", 1e9)),
}
# Of a chart of which nothing is known yet.
_DEFAULT_UNITS = {Quantity.SECONDS: ("s", 1.0), Quantity.BYTES_PER_S: ("GB/s", 1e9)}
_MIN_TOP, _MAX_TOP = 0.04, 5000.0  # of a scale, in its unit


def choose_scale(kind: Quantity, largest: float, height: int) -> FittedScale:
    """A scale from zero in units for people, with ticks 1, 2 or 5 times a power of ten apart, for ``height`` rows.

    ``largest`` is in SI units; ``highest`` of the scale is what to give charts as their ``top``. What is not a number or
    not above zero gets a scale up to one.
    """
    rows = max(1, height)
    if kind is Quantity.PERCENT:
        return FittedScale("%", 1.0, 25.0 if height >= 8 else 50.0 if height >= 2 else 100.0, 100.0, rows)
    if not 0 < largest < math.inf:
        unit, size = get_units().sizes.giga if kind is Quantity.BYTES else _DEFAULT_UNITS.get(kind, _UNITS[kind][0][1:])
        return FittedScale(unit, 1 / size, 1.0, 1.0, rows)
    unit, size = next((unit, size) for least, unit, size in reversed(_list_units(kind)) if largest >= least)
    most = 4 if height >= 8 else 3 if height >= 6 else 2 if height >= 2 else 1
    return FittedScale(unit, 1 / size, *choose_ticks(min(max(largest / size, _MIN_TOP), _MAX_TOP), most), rows)


def _list_units(kind: Quantity) -> tuple[tuple[float, str, float], ...]:
    if kind is not Quantity.BYTES:
        return _UNITS[kind]
    kilo, mega, giga, tera = get_units().sizes
    return (0, *kilo), (mega.bytes / 10, *mega), (giga.bytes / 10, *giga), (5000 * giga.bytes, *tera)


class GrowingScales:
    """The largest value seen of each chart: its scale grows and never shrinks, until it is forgotten.

    Forget when what is looked at becomes another: another range of time, another rank.
    """

    def __init__(self) -> None:
        self._largest: dict[str, float] = {}

    def track_largest(self, chart: str, value: float) -> float:
        """The largest of ``value`` and of all that came before for this chart; NaN and infinite ones do not count."""
        before = self._largest.get(chart, 0.0)
        if math.isfinite(value) and value > before:
            self._largest[chart] = before = value
        return before

    def choose_scale(self, chart: str, kind: Quantity, value: float, height: int) -> FittedScale:
        """A scale for all values seen."""
        return choose_scale(kind, self.track_largest(chart, value), height)

    def clear(self) -> None:
        """Begins anew."""
        self._largest.clear()
