"""Types of command-line options: they raise ArgumentTypeError with a reason."""

from __future__ import annotations

import argparse
import re

from zerotop_probe.recording.directory import MIN_BYTES


def parse_count(text: str) -> int:
    """Return a positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def parse_size(text: str) -> int:
    """Return a size such as ``2GB`` or ``500M`` in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(K|M|G|T)(i?)B?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 500MB or 2GB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** ("KMGT".index(match[2].upper()) + 1))


def parse_max_size(text: str) -> int:
    """Return the largest size of a recording in bytes."""
    size = parse_size(text)
    if size < MIN_BYTES:
        raise argparse.ArgumentTypeError(f"a recording needs at least {MIN_BYTES // 10**6}MB")
    return size


def parse_percent(text: str) -> float:
    """Return a percentage, such as ``0.3`` or ``0.3%``."""
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 < percent <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not a percentage such as 0.3")
    return percent


def parse_age(text: str) -> float:
    """Return an age such as ``12h`` or ``30d`` in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mhdw])", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is not an age such as 12h, 30d or 4w")
    return float(match[1]) * {"m": 60, "h": 3600, "d": 86400, "w": 604800}[match[2].lower()]
