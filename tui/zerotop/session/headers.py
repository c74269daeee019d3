"""The first line of every file of a recording: its format, its writer and the writer's clock."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zerotop_probe.recording.tables import FORMAT_MAJOR

MAX_NUMBER = 1 << 62
"""Limit of every size, count and time: the sum of two still fits into a column of a table."""

_MAX_ID = (1 << 31) - 1  # limit of ranks and process ids

# Exceptions of reading facts from JSON of any shape.
DAMAGE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class SessionError(Exception):
    """A recording cannot be read; the text is a sentence for the user."""


class Writer(NamedTuple):
    """The writer of a file."""

    role: str
    rank: int
    host: str
    pid: int

    @classmethod
    def from_header(cls, header: dict[str, Any]) -> Writer:
        """Return the writer that a header names. Raise one of :data:`DAMAGE_ERRORS` if it is invalid."""
        writer = header["writer"]
        rank, pid = parse_integer(writer["rank"], _MAX_ID), parse_integer(writer["pid"], _MAX_ID)
        return cls(str(writer["role"]), rank, str(writer["host"]), pid)


def parse_integer(value: Any, limit: int = MAX_NUMBER) -> int:
    """Return a value as an integer. Raise ValueError, TypeError or OverflowError if it is none or exceeds the limit."""
    number = int(value)
    if abs(number) > limit:
        raise ValueError("the number is too large")
    return number


@dataclass
class Clocks:
    """Offsets from CLOCK_MONOTONIC to unix time, one for each boot, even if the wall clock was set meanwhile."""

    offsets: dict[str, int] = field(default_factory=dict)

    def find_offset(self, header: dict[str, Any]) -> int:
        """Return the nanoseconds to add to monotonic times of the file with this header."""
        pair = header["clock"]
        offset = parse_integer(int(pair["unix_ns"]) - int(pair["monotonic_ns"]))
        boot = header.get("writer", header).get("boot") or ""
        return self.offsets.setdefault(boot, offset) if boot else offset


def read_header(line: bytes, name: str) -> dict[str, Any]:
    """Parse a file's first line. Raise SessionError for a newer format, ValueError for a line that is no header."""
    header = json.loads(line)
    if not isinstance(header, dict) or "clock" not in header:
        raise ValueError(f"{name} has no header")
    check_format(header, name)
    return header


def check_format(header: dict[str, Any], name: str) -> None:
    """Raise SessionError for the format of a newer zerotop, ValueError without a format."""
    version = header.get("zerotop")
    if not isinstance(version, list) or not version or not isinstance(version[0], int):
        raise ValueError(f"{name} does not say its format")
    if version[0] > FORMAT_MAJOR:
        raise SessionError(
            f"{name} has recording format {version[0]}, this zerotop reads up to {FORMAT_MAJOR}: use a newer zerotop."
        )
