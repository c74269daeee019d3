"""The first line of every file of a recording: its format, its writer and the writer's clock."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zerotop_probe.recording.tables import FORMAT_MAJOR
from zerotop_probe.recording.writer import Identity

MAX_NUMBER = 1 << 62
"""Limit of every size, count and time: the sum of two still fits into a column of a table."""

_MAX_ID = (1 << 31) - 1  # limit of ranks and process ids
_MAX_NAME = 255  # characters of a host name
# Numbers and bytes of a fixed length, which Parquet restores exactly.
_PLAIN_TYPE = re.compile(r"<[iu][248]|<f[48]|\|[iu]1|\|?S[1-9]\d{0,3}")
_MAX_COLUMNS = 256

# Exceptions of reading facts from JSON of any shape.
DAMAGE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class RecordingError(Exception):
    """A recording cannot be read; the text is a sentence for the user."""


def parse_writer(header: dict[str, Any]) -> Identity:
    """Return the writer that a header names. Raise one of :data:`DAMAGE_ERRORS` if it is invalid."""
    writer = header["writer"]
    rank, pid = parse_integer(writer["rank"], _MAX_ID), parse_integer(writer["pid"], _MAX_ID)
    role, host, boot = (str(writer.get(name) or "")[:_MAX_NAME] for name in ("role", "host", "boot"))
    return Identity(role, rank, host, pid, parse_integer(writer.get("start") or 0), boot)


def parse_integer(value: Any, limit: int = MAX_NUMBER) -> int:
    """Return a value as an integer. Raise ValueError, TypeError or OverflowError if it is none or exceeds the limit."""
    number = int(value)
    if abs(number) > limit:
        raise ValueError("the number is too large")
    return number


@dataclass
class Clocks:
    """Offsets from CLOCK_MONOTONIC to unix time, one for each boot, even if the wall clock was set during it."""

    offsets: dict[str, int] = field(default_factory=dict)
    errors_ns: dict[str, int] = field(default_factory=dict)
    """How wrong the clocks of nodes may be that were aligned by round trips, by host."""

    def find_offset(self, header: dict[str, Any]) -> int:
        """Return the nanoseconds to add to monotonic times of the file with this header."""
        pair = header["clock"]
        offset = parse_integer(parse_integer(pair["unix_ns"]) - parse_integer(pair["monotonic_ns"]))
        boot = header.get("writer", header).get("boot") or ""
        return self.offsets.setdefault(boot, offset) if boot else offset

    def note_error(self, header: dict[str, Any]) -> None:
        """Note the error that a header states for the clock of its node; the first one counts, as for offsets."""
        if header.get("error_ns") is not None:
            self.errors_ns.setdefault(parse_writer(header).host, parse_integer(header["error_ns"]))


def read_header(line: bytes, name: str) -> dict[str, Any]:
    """Parse a file's first line. Raise RecordingError for a newer format, ValueError for a line that is no header."""
    header = json.loads(line)
    if not isinstance(header, dict) or "clock" not in header:
        raise ValueError(f"{name} has no header")
    check_format(header, name)
    return header


def check_format(header: dict[str, Any], name: str) -> None:
    """Raise RecordingError for the format of a newer zerotop, ValueError without a format."""
    version = header.get("zerotop")
    if not isinstance(version, list) or not version or not isinstance(version[0], int):
        raise ValueError(f"{name} does not say its format")
    if version[0] > FORMAT_MAJOR:
        raise RecordingError(
            f"{name} has recording format {version[0]}, this zerotop reads up to {FORMAT_MAJOR}: use a newer zerotop."
        )


def parse_columns(columns: Any) -> np.dtype[Any]:
    """Return the dtype of a table's records from its header.

    Raise ValueError or TypeError for types other than numbers and bytes, and for repeated or too many columns.
    """
    fields = [(str(name), str(code)) for name, code in columns]
    if not 0 < len(fields) <= _MAX_COLUMNS:
        raise ValueError(f"there are {len(fields)} columns")
    for name, code in fields:
        if not _PLAIN_TYPE.fullmatch(code):
            raise ValueError(f"{name} is of type {code}")
    return np.dtype(fields)
