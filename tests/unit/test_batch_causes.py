"""What is said of steps that have more or larger batches when iterations take longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from zerotop.analysis.annotations.support.causes.batch_causes import check_batch
from zerotop.analysis.annotations.support.causes.step_change import StepChange
from zerotop.analysis.steps.step_dtype import STEP_DTYPE


def make_steps(rows: int, tokens: int, micro_steps: int, seconds: float) -> Any:
    steps = np.zeros(8, STEP_DTYPE)
    steps["rows"], steps["tokens"], steps["micro_steps"], steps["iteration_s"] = rows, tokens, micro_steps, seconds
    return steps


@pytest.mark.parametrize(
    ("size", "text"),
    [
        ((16, 1024, 4), "a rank's steps have 4 micro-batches instead of 1"),
        ((16, 0, 4), "a rank's steps have 4 micro-batches instead of 1"),
        ((16, 1024, 1), "a rank's steps have 16 rows instead of 4"),
        ((4, 1024, 1), "a rank's batches have 1024 tokens instead of 256"),
        ((16, 1024, 2), "a rank's steps have 16 rows instead of 4"),
    ],
    ids=["accumulation", "without tokens", "rows", "length", "both"],
)
def test_what_has_changed_is_named(size: tuple[int, int, int], text: str) -> None:
    before, after = make_steps(4, 256 if size[1] else 0, 1, 0.1), make_steps(*size, 0.4)
    cause = check_batch(cast("StepChange", SimpleNamespace(before=before, after=after, phased=(before, after))))
    assert cause is not None
    assert (cause.text, cause.is_expected) == (text, True)
