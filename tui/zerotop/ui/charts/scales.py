"""Scales of value axes for each kind of quantity, and what keeps them from shrinking while somebody watches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from zerotop.ui.charts.step_axis import Scale
from zerotop.ui.drawing.formatting import ticks
from zerotop.ui.drawing.units import chosen


@dataclass(frozen=True)
class Fitted(Scale):
    """A scale for so many rows. Ticks stand whole rows apart, so that the chart may reach a little beyond the last one."""

    rows: int = 0

    @property
    def highest(self) -> float:
        """What the uppermost edge of the chart stands for, in what is measured."""
        return self.top / self.factor * self.rows / max(1, self.plotted(self.rows))


class Kind(Enum):
    """What is measured, and in what."""

    PERCENT = "percent"  # 0 to 100, always all of it
    SECONDS = "seconds"
    BYTES = "bytes"
    BYTES_PER_S = "bytes per second"
    WATTS = "watts"
    CORES = "cores"
    NUMBER = "number"


# (from which value on, in SI; unit; what one of it is in SI), so that no label has more than four characters.
_UNITS: dict[Kind, tuple[tuple[float, str, float], ...]] = {
    Kind.SECONDS: (
        (0, "µs", 1e-6),
        (5e-4, "ms", 1e-3),
        (0.5, "s", 1),
        (300, "min", 60),
        (18000, "h", 3600),
        (1.8e7, "d", 86400),
    ),
    Kind.BYTES_PER_S: ((0, "kB/s", 1e3), (1e5, "MB/s", 1e6), (1e8, "GB/s", 1e9), (5e12, "TB/s", 1e12)),
    Kind.WATTS: ((0, "W", 1), (5000, "kW", 1e3), (5e6, "MW", 1e6)),
    Kind.CORES: ((0, "cores", 1), (5000, "k cores", 1e3)),
    Kind.NUMBER: ((0, "", 1), (5000, "k", 1e3), (5e6, "M", 1e6), (5e9, "G", 1e9)),
}
# Of a chart of which nothing is known yet.
_USUAL = {Kind.SECONDS: ("s", 1.0), Kind.BYTES_PER_S: ("GB/s", 1e9)}
_LEAST, _MOST = 0.04, 5000.0  # of a scale, in its unit


def scale(kind: Kind, largest: float, height: int) -> Fitted:
    """A scale from zero in units for people, with ticks 1, 2 or 5 times a power of ten apart, for ``height`` rows.

    ``largest`` is in SI units; ``highest`` of the scale is what to give charts as their ``top``. What is not a number or
    not above zero gets a scale up to one.
    """
    rows = max(1, height)
    if kind is Kind.PERCENT:
        return Fitted("%", 1.0, 25.0 if height >= 8 else 50.0 if height >= 2 else 100.0, 100.0, rows)
    if not 0 < largest < math.inf:
        unit, size = chosen().sizes.giga if kind is Kind.BYTES else _USUAL.get(kind, _UNITS[kind][0][1:])
        return Fitted(unit, 1 / size, 1.0, 1.0, rows)
    unit, size = next((unit, size) for least, unit, size in reversed(_units(kind)) if largest >= least)
    most = 4 if height >= 8 else 3 if height >= 6 else 2 if height >= 2 else 1
    return Fitted(unit, 1 / size, *ticks(min(max(largest / size, _LEAST), _MOST), most), rows)


def _units(kind: Kind) -> tuple[tuple[float, str, float], ...]:
    if kind is not Kind.BYTES:
        return _UNITS[kind]
    kilo, mega, giga, tera = chosen().sizes
    return (0, *kilo), (mega.bytes / 10, *mega), (giga.bytes / 10, *giga), (5000 * giga.bytes, *tera)


class Watched:
    """The largest value seen of each chart: its scale grows and never shrinks, until it is forgotten.

    Forget when what is looked at becomes another: another range of time, another rank.
    """

    def __init__(self) -> None:
        self._largest: dict[str, float] = {}

    def largest(self, chart: str, value: float) -> float:
        """The largest of ``value`` and of all that came before for this chart; NaN and infinite ones do not count."""
        before = self._largest.get(chart, 0.0)
        if math.isfinite(value) and value > before:
            self._largest[chart] = before = value
        return before

    def scale(self, chart: str, kind: Kind, value: float, height: int) -> Fitted:
        """A scale for all values seen."""
        return scale(kind, self.largest(chart, value), height)

    def forget(self) -> None:
        """Begins anew."""
        self._largest.clear()
