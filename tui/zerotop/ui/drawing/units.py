"""What sizes and paces are told in: one choice of the user's for the whole program, as a locale is.

A process shows one user one screen, and all numbers on it are to be in the same units. So the choice is kept here and read
by the few functions that write numbers or make scales; as an argument it would pass through every function that draws, most
of which write no size. Whoever keeps what was drawn keeps :func:`chosen` with it.

It is for screens alone: what is kept or sent on is in bytes and seconds, and texts of commands and recorded sentences are
in GiB, whoever runs them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from zerotop.analysis import formatting


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


_SIZE = re.compile(r"(\d+(?:\.\d+)?)(?: to (\d+(?:\.\d+)?))? ([KMGT]iB)\b")
_PARTNERS = {binary.name: (binary, decimal) for binary, decimal in zip(BINARY, DECIMAL, strict=True)}


def convert_sizes(sentence: str, exact: Iterable[float] = ()) -> str:
    """A sentence of a finding with its sizes in the units that were chosen.

    Such sentences are made where facts are found; recordings, exports and commands have the same ones, in GiB.

    Args:
        exact: the numbers that it rests on. A size of the sentence that is one of them, rounded, is not rounded twice.
    """
    if _current_units.sizes is BINARY or "iB" not in sentence:
        return sentence
    known = {formatting.format_bytes(value): value for value in exact}

    def convert_match(match: re.Match[str]) -> str:
        binary, decimal = _PARTNERS[match[3]]

        def convert_number(number: str) -> str:
            size = known.get(f"{number} {binary.name}", float(number) * binary.bytes)
            return f"{size / decimal.bytes:.{len(number.partition('.')[2])}f}"

        return f"{' to '.join(convert_number(number) for number in match.groups()[:2] if number)} {decimal.name}"

    return _SIZE.sub(convert_match, sentence)
