"""Tokens of many steps, some of them only counted."""

from __future__ import annotations

import numpy as np

from zerotop.recording.samples import Ints, Rows
from zerotop.recording.steps.missing_steps import find_recorded


def estimate_tokens(rows: Rows, tokens: Ints) -> float:
    """Return the tokens of all steps recorded among some steps (STEP_DTYPE), each with ``tokens``.

    A counted step, whose tokens are unknown, counts with the average of the others.
    """
    weights = rows["steps"] * find_recorded(rows)
    known = weights[tokens > 0].sum()
    total = float((np.maximum(tokens, 0) * weights).sum())
    return total * float(weights.sum() / known) if known and rows["counted"].any() else total
