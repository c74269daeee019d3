"""Types of command-line options: they raise ArgumentTypeError with a reason."""

from __future__ import annotations

import argparse
import re
from decimal import Decimal
from typing import TYPE_CHECKING

from zerotop_probe.recording.directory import MIN_BYTES

if TYPE_CHECKING:
    from zerotop.analysis.prices import HourlyPrice

_SCALES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def parse_count(text: str) -> int:
    """Return a positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def parse_parameters(text: str) -> int:
    """Return a number of parameters, such as ``494M``, ``8B`` or ``8030261248``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.upper())
    count = Decimal(found[1]) * _SCALES[found[2]] if found is not None else Decimal(0)
    if count < 1 or count % 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of parameters, such as 494M or 8B")
    return int(count)


def parse_natural(text: str) -> int:
    """Return a whole number, 0 included."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number")
    return int(text)


def parse_size(text: str) -> int:
    """Return a size such as ``2GB`` or ``500M`` in bytes."""
    from zerotop.analysis.formatting import parse_bytes  # it brings NumPy, which most commands can start without

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_memory(text: str) -> int:
    """Return the memory of a device or node in bytes."""
    size = parse_size(text)
    if size < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text} is less than a MiB, which is no memory to train in")
    return size


def parse_max_size(text: str) -> int:
    """Return the largest size of a recording in bytes."""
    size = parse_size(text)
    if size < MIN_BYTES:
        raise argparse.ArgumentTypeError(f"a recording needs at least {MIN_BYTES // 10**6}MB")
    return size


def parse_speed(text: str) -> float:
    """Return the speed of a replay, such as ``4`` or ``4x``."""
    try:
        return float(text.removesuffix("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a speed such as 0.5 or 20") from None


def parse_percent(text: str) -> float:
    """Return a percentage, such as ``0.3`` or ``0.3%``."""
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 < percent <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not a percentage such as 0.3")
    return percent


def parse_share(text: str) -> float:
    """Return a share of more than 0, up to 1."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share such as 0.5")
    return share


def parse_age(text: str) -> float:
    """Return an age such as ``12h`` or ``30d`` in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mhdw])", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is not an age such as 12h, 30d or 4w")
    return float(match[1]) * {"m": 60, "h": 3600, "d": 86400, "w": 604800}[match[2].lower()]


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``9400`` or ``0.0.0.0:9400``."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text} is not a port such as 9400, or an address such as 0.0.0.0:9400")
    return host.strip("[]") or "127.0.0.1", int(port)


def parse_price(text: str) -> HourlyPrice:
    """Return a price per hour such as ``30``, ``$29.50`` or ``28EUR``."""
    from zerotop.analysis.prices import HourlyPrice

    try:
        return HourlyPrice.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
