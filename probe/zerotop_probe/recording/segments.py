"""Segments: the files that a long table is divided into, so that old ones can be folded while it grows.

The first file of a table is ``STEM.rec``, the next ones are ``STEM.s000001.rec`` and so on. All begin with the same header
line, padded to whole pages. The records of all but the last fill whole pages too, so that a reader can map the files one
after the other as one array.
"""

from __future__ import annotations

import math
import re

PAGE_BYTES = 4096
SEGMENT_BYTES = 1 << 18

_NAME = re.compile(r"(.+?)(?:\.s(\d{6}))?\.rec")


def pad_header(line: bytes) -> bytes:
    """Return a header line, without its newline, as the first pages of a file."""
    return line.ljust(-(-(len(line) + 1) // PAGE_BYTES) * PAGE_BYTES - 1) + b"\n"


def count_records(record_bytes: int) -> int:
    """Return the number of records in a full segment: about SEGMENT_BYTES, and whole pages."""
    unit = PAGE_BYTES // math.gcd(PAGE_BYTES, record_bytes)
    return max(1, SEGMENT_BYTES // (unit * record_bytes)) * unit


def make_name(stem: str, number: int) -> str:
    """Return the name of a segment; the first has the number 0."""
    return f"{stem}.s{number:06}.rec" if number else f"{stem}.rec"


def parse_name(name: str) -> tuple[str, int] | None:
    """Return the (stem, number) of a segment's name; None for another file."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], int(match[2] or 0))
