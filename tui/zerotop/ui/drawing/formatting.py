"""Numbers as text of a fixed or bounded width, so that changing values do not shift the layout.

Unknown values (None, NaN) become an en dash, to tell them from zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from zerotop.ui.drawing import units
from zerotop.ui.drawing.units import PaceUnit

MISSING = "–"


def is_known(value: float | None) -> bool:
    """Return whether a value was recorded."""
    return value is not None and not math.isnan(value)


def format_fixed(value: float | None, decimals: int, width: int) -> str:
    """Return a right-aligned number, with fewer decimals if it would not fit in ``width`` cells."""
    if value is None or math.isnan(value):
        return MISSING.rjust(width)
    text = f"{value:{width}.{decimals}f}"
    while len(text) > width and decimals > 0:
        decimals -= 1
        text = f"{value:{width}.{decimals}f}"
    return text


def choose_decimals(largest: float) -> int:
    """Return the decimals that keep about three significant digits of the largest value in a column."""
    return 0 if largest >= 1000 else 1 if largest >= 10 else 2


def format_giga(size: int | None, decimals: int = 1, width: int = 5) -> str:
    """Return bytes in GiB or GB, whichever is set, without the unit."""
    return format_fixed(None if size is None else size / units.giga_unit().bytes, decimals, width)


def format_size(count: float) -> str:
    """Return bytes in three significant digits: ``807 KiB``, ``1.25 GiB``, ``-40.2 MB``."""
    sizes = units.get_units().sizes
    for unit in (sizes.tera, sizes.giga, sizes.mega, sizes.kilo):
        if abs(count) >= unit.bytes * 0.9995:
            return f"{'-' if count < 0 else ''}{format_significant(abs(count) / unit.bytes)} {unit.name}"
    return f"{count:.0f} B"


@dataclass(frozen=True)
class SizeUnit:
    """The unit of all figures of a panel, named in its title."""

    name: str
    size: int
    decimals: int
    width: int

    def format_bytes(self, count: int | None) -> str:
        """Return bytes in this unit, right-aligned; a value above zero never reads as zero."""
        if count is None:
            return format_fixed(None, self.decimals, self.width)
        least = 10**-self.decimals
        if 0 < abs(count) / self.size < least / 2:
            return f"<{least:.{self.decimals}f}".rjust(self.width)
        return format_fixed(count / self.size, self.decimals, self.width)

    def format_signed(self, count: int) -> str:
        """Return bytes in this unit with a sign, unless they read as zero."""
        text = f"{count / self.size:+.{self.decimals}f}"
        return (text if text.strip("+-0.") else f"{0:.{self.decimals}f}").rjust(self.width)


def choose_size_unit(largest: int) -> SizeUnit:
    """Return GiB, or MiB for small amounts; or GB and MB."""
    _, mega, giga, _ = units.get_units().sizes
    if largest < 2 * giga.bytes:
        return SizeUnit(*mega, 1, 7)
    return SizeUnit(*giga, 2 if largest < 1000 * giga.bytes else 1, 7)


def format_number(number: float | None) -> str:
    """Return a count in three significant digits: ``823``, ``1.49k``, ``63.2M``, ``8.03B``."""
    if number is None or math.isnan(number):
        return MISSING
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= factor * 0.9995:
            return format_significant(number / factor) + suffix
    return f"{number:.0f}"


def format_significant(value: float) -> str:
    """Return three significant digits without an exponent: ``8.03``, ``12.3``, ``123``."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def format_duration(duration: float) -> str:
    """Return a duration in three significant digits: ``0.19 ms``, ``34.4 ms``, ``324 ms``, ``2.67 s``."""
    size = abs(duration)
    text = f"{format_significant(size * 1e3)} ms" if size < 0.9995 else f"{format_significant(size)} s"
    return f"-{text}" if duration < 0 else text


def format_time_span(seconds: float) -> str:
    """Return a duration of any size: ``35 µs``, ``412 ms``, ``2.75 s``, ``12:34``."""
    for limit_s, unit in ((1e-6, "ns"), (1e-3, "µs")):
        if seconds < limit_s * 0.9995:
            return f"{format_significant(seconds / limit_s * 1e3)} {unit}"
    return format_duration(seconds) if seconds < 60 else format_clock(seconds)


def format_pace(iteration_s: float) -> str:
    """Return the pace of iterations: ``2.75 s/it``, ``412 ms/it``; or ``0.364 it/s``, ``2.43 it/s``."""
    pace = units.get_units().pace
    if math.isnan(iteration_s) or iteration_s <= 0:
        return f"{MISSING} {pace.value}"
    if pace is PaceUnit.RATE:
        return f"{format_rate(iteration_s)} {pace.value}"
    return f"{format_duration(iteration_s)}/it"


def format_rate(iteration_s: float) -> str:
    """Return iterations per second: ``12.3``, ``2.43``, ``0.364``, ``0.0222``."""
    rate = 1 / iteration_s
    return format_significant(rate) if rate >= 0.995 else f"{rate:.3f}" if rate >= 0.0995 else f"{rate:.4f}"


def format_clock(seconds: float) -> str:
    """Return elapsed time: ``0:42``, ``12:34``, ``1:02:03``, ``2d 03:04``."""
    if not math.isfinite(seconds):
        return MISSING
    whole = int(max(0.0, seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def format_rough_time(seconds: float) -> str:
    """Return a rough duration: ``45 s``, ``27 min``, ``3.2 h``, ``2.1 d``."""
    if not math.isfinite(seconds):
        return MISSING
    for limit, factor, unit, decimals in ((99.5, 1, "s", 0), (5970, 60, "min", 0), (172800, 3600, "h", 1)):
        if seconds < limit:
            return f"{seconds / factor:.{decimals}f} {unit}"
    return f"{seconds / 86400:.1f} d"


def choose_time_unit(longest_s: float) -> tuple[str, float]:
    """Return (unit, units per second) for a chart with this longest time."""
    if longest_s < 0.5:
        return "ms", 1000.0
    return ("s", 1.0) if longest_s < 300 else ("min", 1 / 60)


def format_share(part: float) -> str:
    """Return a small share as a percentage: ``0.002 %``, ``0.31 %``, ``4.2 %``, ``64 %``."""
    if math.isnan(part):
        return f"{MISSING} %"
    percent = part * 100
    decimals = 0 if percent >= 9.95 else 1 if percent >= 0.995 else 2 if percent >= 0.01 or percent == 0 else 3
    return f"{percent:.{decimals}f} %"


def format_range(values: Iterable[float], decimals: int) -> str:
    """Return the smallest and largest known value: ``0.6 to 1.2``, or ``0.6`` if both read the same."""
    texts = [f"{value:.{decimals}f}" for value in sorted(value for value in values if is_known(value))]
    if not texts:
        return MISSING
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def format_grouped(number: int) -> str:
    """Return an integer with grouped digits: ``1 234 567``."""
    return f"{number:,}".replace(",", " ")


def choose_ticks(longest: float, most: int) -> tuple[float, float]:
    """Return (distance between ticks, top of the axis) for an axis from zero with at most ``most`` ticks above it.

    The distance is 1, 2 or 5 times a power of ten; the top is a multiple of it.
    """
    if not longest > 0 or math.isinf(longest):
        return 1.0, 1.0
    power = 10.0 ** math.floor(math.log10(longest / most))
    for factor in (1, 2, 5, 10, 20, 50):
        distance = power * factor
        number = math.ceil(longest / distance - 1e-9)
        if number <= most:
            return distance, distance * number
    return longest, longest
