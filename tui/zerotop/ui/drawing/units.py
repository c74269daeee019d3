"""What sizes and paces are told in: one choice of the user's for the whole program, as a locale is.

A process shows one user one screen, and all numbers on it are to be in the same units. So the choice is kept here and read
by the few functions that write numbers or make scales; as an argument it would pass through every function that draws, most
of which write no size. Whoever keeps what was drawn keeps :func:`chosen` with it.

It is for screens alone: what is kept or sent on is in bytes and seconds, and texts of commands and recorded sentences are
in GiB, whoever runs them.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from zerotop.analysis.formatting import Text


class Unit(NamedTuple):
    """Of sizes."""

    name: str
    bytes: int  # that one of it is


class Sizes(NamedTuple):
    """Units of memory and files, from small to large. Rates of PCIe are decimal in both, as links are sold."""

    kilo: Unit
    mega: Unit
    giga: Unit
    tera: Unit

    @property
    def name(self) -> str:
        """By which the user's choice is kept."""
        return self.giga.name


class Pace(Enum):
    """How fast iterations are told to be."""

    SECONDS = "s/it"
    RATE = "it/s"


class UnitChoice(NamedTuple):
    """What was chosen."""

    sizes: Sizes
    pace: Pace


BINARY = Sizes(Unit("KiB", 1 << 10), Unit("MiB", 1 << 20), Unit("GiB", 1 << 30), Unit("TiB", 1 << 40))
DECIMAL = Sizes(Unit("kB", 10**3), Unit("MB", 10**6), Unit("GB", 10**9), Unit("TB", 10**12))
DEFAULT_UNITS = UnitChoice(BINARY, Pace.SECONDS)

_current_units = DEFAULT_UNITS


def get_units() -> UnitChoice:
    """What is in force."""
    return _current_units


def set_units(choice: UnitChoice) -> None:
    """From now on."""
    global _current_units
    _current_units = choice


def parse_units(sizes: str, pace: str) -> UnitChoice:
    """The choice of these names; the usual for one that is unknown."""
    return UnitChoice(
        DECIMAL if sizes == DECIMAL.name else BINARY,
        Pace.RATE if pace == Pace.RATE.value else Pace.SECONDS,
    )


def other_sizes() -> Sizes:
    """Those that were not chosen."""
    return BINARY if _current_units.sizes is DECIMAL else DECIMAL


def other_pace() -> Pace:
    """The one that was not chosen."""
    return Pace.SECONDS if _current_units.pace is Pace.RATE else Pace.RATE


def giga_unit() -> Unit:
    """GiB or GB."""
    return _current_units.sizes.giga


def convert_sizes(sentence: str) -> str:
    """Return a sentence with its sizes in the chosen units; one that is plain text as it is."""
    return sentence.render(_current_units.sizes[:3]) if isinstance(sentence, Text) else sentence
