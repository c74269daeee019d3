"""Medians of values, some of them unknown."""

from __future__ import annotations

import numpy as np

from zerotop.recording.samples import Floats


def compute_known_median(values: Floats) -> float:
    """Return the median of the values that are not NaN; NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else float("nan")
