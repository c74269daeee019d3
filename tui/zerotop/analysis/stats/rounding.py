"""Rounding of growing counts that size a chart, so that it is rarely rescaled."""

from __future__ import annotations


def round_count_up(count: int) -> int:
    """Return an eighth of a power of two or the next one: ``count``, or up to 9 % more."""
    eighth = 1 << max(0, count.bit_length() - 4)
    return -(-count // eighth) * eighth
