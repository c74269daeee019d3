"""Runs of set flags."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zerotop.session.samples import Ints


def find_first_run(flags: NDArray[np.bool_], length: int) -> int | None:
    """Return the index of the first ``length`` set flags in a row."""
    if len(flags) < length:
        return None
    runs = np.lib.stride_tricks.sliding_window_view(flags, length).all(axis=1)
    return int(np.argmax(runs)) if runs.any() else None


def find_run_begins(flags: NDArray[np.bool_]) -> Ints:
    """Return the index at which the run of each set flag begins; 0 also means that it may have begun before."""
    begins: Ints = np.maximum.accumulate(np.where(flags, 0, np.arange(1, len(flags) + 1)))
    return begins
