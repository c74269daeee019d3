"""Scales of value axes for each kind of quantity, and what keeps them from shrinking while somebody watches."""

from __future__ import annotations

import math
from enum import Enum

from zerotop.ui.drawing.axis import Scale
from zerotop.ui.format import GIB, ticks, time_unit


class Kind(Enum):
    """What is measured, and in what."""

    PERCENT = "percent"  # 0 to 100, always all of it
    SECONDS = "seconds"
    BYTES = "bytes"
    BYTES_PER_S = "bytes per second"
    WATTS = "watts"
    CORES = "cores"
    NUMBER = "number"


def scale(kind: Kind, largest: float, height: int) -> Scale:
    """A scale from zero in units for people, with ticks 1, 2 or 5 times a power of ten apart, for ``height`` rows.

    ``largest`` is in SI units. What is not a number or not above zero gets the smallest sensible scale.
    """
    most = 4 if height >= 8 else 3 if height >= 6 else 2 if height >= 2 else 1
    if kind is Kind.PERCENT:
        return Scale("%", 1.0, 25.0 if height >= 8 else 50.0 if height >= 2 else 100.0, 100.0)
    unit, factor = _unit(kind, largest)
    if not 0 < largest * factor < math.inf:
        return Scale(unit, factor, 1.0, 1.0)
    return Scale(unit, factor, *ticks(largest * factor, most))


def _unit(kind: Kind, largest: float) -> tuple[str, float]:
    if kind is Kind.SECONDS:
        return time_unit(largest)
    if kind is Kind.BYTES:
        return ("GiB", 1 / GIB) if not largest < GIB / 10 else ("MiB", 1 / 1024**2)
    if kind is Kind.BYTES_PER_S:
        return ("GB/s", 1e-9) if not largest < 1e8 else ("MB/s", 1e-6)
    return {Kind.WATTS: "W", Kind.CORES: "cores"}.get(kind, ""), 1.0


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

    def scale(self, chart: str, kind: Kind, value: float, height: int) -> Scale:
        """A scale for all values seen."""
        return scale(kind, self.largest(chart, value), height)

    def forget(self) -> None:
        """Begins anew."""
        self._largest.clear()
