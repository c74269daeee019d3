"""Units of sizes and paces, a setting of the user for the whole process, like a locale.

A process shows one screen to one user, with all numbers in the same units. So this module holds the setting, and the few
functions that format numbers or make scales read it; as an argument it would pass through every drawing function, most of
which format no size. Caches of drawn rows include :func:`get_units` in their key.

It applies to screens only: stored and exported data are in bytes and seconds, and the texts of commands and recorded
sentences are in GiB for everybody.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from zerotop.analysis.formatting import Text


class ByteUnit(NamedTuple):
    """A unit of sizes."""

    name: str
    bytes: int


class Sizes(NamedTuple):
    """Units of memory and files, from small to large. PCIe rates are always decimal, as in specifications of links."""

    kilo: ByteUnit
    mega: ByteUnit
    giga: ByteUnit
    tera: ByteUnit

    @property
    def name(self) -> str:
        """The name in the settings file."""
        return self.giga.name


class PaceUnit(Enum):
    """Units of the pace of iterations."""

    SECONDS = "s/it"
    RATE = "it/s"


class UnitChoice(NamedTuple):
    """The user's choice of units."""

    sizes: Sizes
    pace: PaceUnit


BINARY = Sizes(ByteUnit("KiB", 1 << 10), ByteUnit("MiB", 1 << 20), ByteUnit("GiB", 1 << 30), ByteUnit("TiB", 1 << 40))
DECIMAL = Sizes(ByteUnit("kB", 10**3), ByteUnit("MB", 10**6), ByteUnit("GB", 10**9), ByteUnit("TB", 10**12))
DEFAULT_UNITS = UnitChoice(BINARY, PaceUnit.SECONDS)

_current_units = DEFAULT_UNITS


def get_units() -> UnitChoice:
    return _current_units


def set_units(choice: UnitChoice) -> None:
    global _current_units
    _current_units = choice


def parse_units(sizes: str, pace: str) -> UnitChoice:
    """Return the units of these names; the default for an unknown name."""
    return UnitChoice(
        DECIMAL if sizes == DECIMAL.name else BINARY,
        PaceUnit.RATE if pace == PaceUnit.RATE.value else PaceUnit.SECONDS,
    )


def other_sizes() -> Sizes:
    """Return the units of size that are not current."""
    return BINARY if _current_units.sizes is DECIMAL else DECIMAL


def other_pace() -> PaceUnit:
    """Return the pace that is not current."""
    return PaceUnit.SECONDS if _current_units.pace is PaceUnit.RATE else PaceUnit.RATE


def giga_unit() -> ByteUnit:
    """Return GiB or GB, whichever is current."""
    return _current_units.sizes.giga


def convert_sizes(sentence: str) -> str:
    """Return a sentence with its sizes in the chosen units; plain text is returned unchanged."""
    return sentence.render(_current_units.sizes[:3]) if isinstance(sentence, Text) else sentence
