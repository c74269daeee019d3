"""The micro-batches of an evaluation, and of the training before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from zerotop.analysis.findings.support.evidence import Process, Rows, Samples
from zerotop_probe.recording.tables import EVAL

BATCHES = (
    "[; its micro-batch is {rows:.0f} x {sequence:.0f} tokens, {tokens_as} training's {training_rows:.0f} x"
    " {training_sequence:.0f}][; its micro-batch has {only_rows:count row}, training's {training_rows:.0f}]"
)
"""A part of details, with the values of measure_batches() and describe_batches()."""
BATCH_ADVICE = "Evaluate with training's batch: it then fits in the memory that training holds."
BATCH_FIX = "{eval_batch_fix}={training_rows:.0f}"

_LARGER = 1.05


def is_batch_larger(shapes: Mapping[str, float]) -> bool:
    """Whether the evaluation's micro-batches are larger than those of training, as far as is known."""
    return shapes.get("tokens_ratio", shapes.get("rows_ratio", 0.0)) > _LARGER


def describe_batches(shapes: Mapping[str, float]) -> dict[str, Any]:
    """Return the values for BATCHES that are not shapes."""
    ratio = shapes.get("tokens_ratio")
    tokens_as = None if ratio is None else "as many as" if f"{ratio:.1f}" == "1.0" else f"{ratio:.1f} times"
    return {"only_rows": shapes.get("rows") if "sequence" not in shapes else None, "tokens_as": tokens_as}


def measure_batches(process: Process, begin_ns: int, end_ns: int) -> dict[str, float]:
    """Return the micro-batches of the evaluation and of the training before it; empty if they are unknown."""
    forwards = process.read_phases(begin_ns, end_ns, "forward")
    before = process.phased_steps_until(begin_ns)[-10:]
    if not len(forwards) or not len(before):
        return {}
    training = process.read_phases(int(before["begin_unix_ns"][0]), begin_ns, "forward")
    forwards = forwards.select(forwards.rows["flags"] & EVAL != 0)
    training = training.select(training.rows["flags"] & EVAL == 0)
    if not len(forwards) or not len(training):
        return {}
    largest, usual = _find_largest(forwards), _find_largest(Samples(training.times[-10:], training.rows[-10:]))
    if min(largest["rows"], usual["rows"]) <= 0:
        return {}
    shapes = {"rows": float(largest["rows"]), "training_rows": float(usual["rows"])}
    shapes["rows_ratio"] = shapes["rows"] / shapes["training_rows"]
    if min(largest["sequence"], usual["sequence"]) > 0:
        shapes |= {"sequence": float(largest["sequence"]), "training_sequence": float(usual["sequence"])}
        shapes["tokens_ratio"] = float(largest["tokens"] / usual["tokens"]) if usual["tokens"] > 0 else shapes["rows_ratio"]
    return shapes


def _find_largest(forwards: Samples) -> Rows:
    sizes = np.where(forwards.rows["tokens"] > 0, forwards.rows["tokens"], forwards.rows["rows"])
    largest: Rows = forwards.rows[int(np.argmax(sizes))]
    return largest
