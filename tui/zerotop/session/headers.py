"""The first line of every file of a recording: which format it is of, who wrote it, by which clock."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zerotop_probe.recording.tables import FORMAT_MAJOR

MAX_NUMBER = 1 << 62
"""No size, count or time is beyond this; two of them can be added in a column of a table."""

_MAX_ID = (1 << 31) - 1  # that of ranks and processes

# What looking for facts in JSON of any shape can raise.
DAMAGE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class SessionError(Exception):
    """A recording cannot be read; the text is a sentence for the user."""


class Writer(NamedTuple):
    """Who wrote a file."""

    role: str
    rank: int
    host: str
    pid: int

    @classmethod
    def from_header(cls, header: dict[str, Any]) -> Writer:
        """As its header says. Raises one of :data:`DAMAGED` where that makes no sense."""
        told = header["writer"]
        return cls(
            str(told["role"]), parse_integer(told["rank"], _MAX_ID), str(told["host"]), parse_integer(told["pid"], _MAX_ID)
        )


def parse_integer(value: Any, limit: int = MAX_NUMBER) -> int:
    """As an integer. Raises ValueError, TypeError or OverflowError for what is none, or beyond the widest."""
    number = int(value)
    if abs(number) > limit:
        raise ValueError("a number is beyond all others")
    return number


@dataclass
class Clocks:
    """What turns CLOCK_MONOTONIC into unix time. Writers of one boot share one clock, whatever the wall clock did since."""

    offsets: dict[str, int] = field(default_factory=dict)

    def find_offset(self, header: dict[str, Any]) -> int:
        """What to add to a monotonic time of the file with this header."""
        pair = header["clock"]
        offset = parse_integer(int(pair["unix_ns"]) - int(pair["monotonic_ns"]))
        boot = header.get("writer", header).get("boot") or ""
        return self.offsets.setdefault(boot, offset) if boot else offset


def read_header(line: bytes, name: str) -> dict[str, Any]:
    """A file's first line. Raises SessionError when it is of a newer format, ValueError when it is no header."""
    header = json.loads(line)
    if not isinstance(header, dict) or "clock" not in header:
        raise ValueError(f"{name} has no header")
    check_format(header, name)
    return header


def check_format(header: dict[str, Any], name: str) -> None:
    """Raises SessionError for a recording that a newer zerotop made."""
    version = header.get("zerotop")
    if not isinstance(version, list) or not version or not isinstance(version[0], int):
        raise ValueError(f"{name} does not say its format")
    if version[0] > FORMAT_MAJOR:
        raise SessionError(
            f"{name} has recording format {version[0]}, this zerotop reads up to {FORMAT_MAJOR}: use a newer zerotop."
        )
