"""Numbers in sentences and printed tables."""

from __future__ import annotations

from collections.abc import Sequence

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def format_bytes(count: float) -> str:
    """Return ``1.25 GiB``, ``40.2 MiB`` or ``37 KiB``."""
    size = abs(count)
    if size >= GIB / 10:
        return f"{count / GIB:.2f} GiB" if size < 100 * GIB else f"{count / GIB:.0f} GiB"
    return f"{count / KIB:.0f} KiB" if 0 < size < MIB / 10 else f"{count / MIB:.1f} MiB"


def format_gib(count: float, *, sign: bool = False) -> str:
    """Return GiB with three decimals and no unit, for columns of sizes."""
    return f"{count / GIB:{'+' if sign else ''}.3f}"


def format_seconds(duration: float) -> str:
    """Return ``2.67 s``, ``12 s`` or ``34 ms``."""
    if duration >= 1:
        return f"{duration:.2f} s" if duration < 10 else f"{duration:.0f} s"
    return f"{duration * 1e3:.0f} ms"


def format_percent(share: float) -> str:
    """Return a share from 0 to 1 as ``67 %``."""
    return f"{share * 100:.0f} %"


def format_count(count: int, noun: str) -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    return f"{count} {pluralize(count, noun)}"


def pluralize(count: int, noun: str) -> str:
    """Return the noun in the number that fits the count: ``rank``, ``ranks``, ``processes``, ``flushes``."""
    return noun if count == 1 else noun + ("es" if noun.endswith(("s", "sh")) else "s")


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, ``ranks 0 to 3`` or ``ranks 0, 2``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(str(rank) for rank in ranks)
