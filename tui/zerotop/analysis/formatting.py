"""Numbers as they stand in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from zerotop.analysis.annotations.support.thresholds import GIB, MIB


def format_bytes(count: float) -> str:
    """Bytes, in GiB or MiB."""
    if abs(count) >= GIB / 10:
        return f"{count / GIB:.2f} GiB" if abs(count) < 100 * GIB else f"{count / GIB:.0f} GiB"
    return f"{count / MIB:.1f} MiB"


def format_seconds(duration: float) -> str:
    """A duration."""
    if duration >= 1:
        return f"{duration:.2f} s" if duration < 10 else f"{duration:.0f} s"
    return f"{duration * 1e3:.0f} ms"


def format_percent(share: float) -> str:
    """A share."""
    return f"{share * 100:.0f} %"


def format_count(count: int, noun: str) -> str:
    """A count of things."""
    return f"{count} {pluralize(count, noun)}"


def pluralize(count: int, noun: str) -> str:
    """What so many of them are called: ``rank``, ``ranks``, ``processes``, ``flushes``."""
    return noun if count == 1 else noun + ("es" if noun.endswith(("s", "sh")) else "s")


def format_ranks(ranks: Sequence[int]) -> str:
    """Which ranks."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(str(rank) for rank in ranks)
