"""Medians of values, some of them unknown.

Rounding of growing counts that size a chart, so that it is rarely rescaled.
"""

from __future__ import annotations

import numpy as np

from zerotop.recording.samples import Floats


def round_count_up(count: int) -> int:
    """Return an eighth of a power of two or the next one: ``count``, or up to 9 % more."""
    eighth = 1 << max(0, count.bit_length() - 4)
    return -(-count // eighth) * eighth


def compute_known_median(values: Floats) -> float:
    """Return the median of the values that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else float("nan")
