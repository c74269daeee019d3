"""One unit for all sizes of a panel."""

from __future__ import annotations

from dataclasses import dataclass

from zerotop.ui.drawing.formatting import format_fixed
from zerotop.ui.drawing.units import get_units


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


def choose_unit(largest: int) -> SizeUnit:
    """Return GiB, or MiB for small amounts; or GB and MB."""
    _, mega, giga, _ = get_units().sizes
    if largest < 2 * giga.bytes:
        return SizeUnit(*mega, 1, 7)
    return SizeUnit(*giga, 2 if largest < 1000 * giga.bytes else 1, 7)
