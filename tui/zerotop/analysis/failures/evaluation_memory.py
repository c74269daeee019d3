"""The memory of an evaluation that ran out of it, beside that of the evaluations before."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from zerotop.recording.keys import RankProcess
from zerotop.recording.moments.at import At
from zerotop.recording.table_files import Source
from zerotop_probe.recording.tables import END, EVAL, FAILED, PHASE_CODE

# From this ratio to the evaluations before on, an evaluation holds more than they did.
_MORE_TIMES = 1.5
LARGER_RATIO = 1.05
"""From this ratio to those before on, a micro-batch is larger, or more forwards were run."""
# Evaluations before to look back to.
_MOST_EARLIER = 16
_EVAL, _FORWARD = PHASE_CODE["eval"], PHASE_CODE["forward"]
_HELD = ("allocated_bytes", "allocated_peak_bytes")


class EvaluationGrowth(NamedTuple):
    """An evaluation that held more than those before, with micro-batches that are no larger."""

    held_bytes: int  # in tensors, when the allocation failed
    before_bytes: int  # the most in tensors in the evaluations before
    evaluations: int  # before
    forwards: int
    before_forwards: int  # the most of an evaluation before
    forward_bytes: int | None  # that each of its forwards left
    before_forward_bytes: int | None  # the most that each forward of an evaluation before left
    batch: dict[str, int]  # rows, sequence and tokens of its largest micro-batch

    @property
    def is_by_forward(self) -> bool:
        """Whether each forward left more than a forward before, which adds up to most of the growth."""
        if self.forward_bytes is None or self.before_forward_bytes is None:
            return False
        more = self.forward_bytes - self.before_forward_bytes
        return (
            self.forward_bytes >= _MORE_TIMES * self.before_forward_bytes
            and 2 * more * self.forwards >= self.held_bytes - self.before_bytes
        )


class _Evaluation(NamedTuple):
    held_bytes: int
    forwards: int
    forward_bytes: int | None
    batch: dict[str, int]


def measure_growth(at: At, process: RankProcess, failed_ns: int, held_bytes: int) -> EvaluationGrowth | None:
    """Compare an evaluation that failed to allocate with those before; None if it held no more, or its batches are larger.

    None also where the evaluations before, or the sizes of micro-batches, are unknown.

    ``held_bytes``: in tensors at that time.
    """
    begins, spans, readings = (at.find_table(name, process) for name in ("begins", "spans", "allocator"))
    if begins is None or spans is None or readings is None:
        return None
    begun = begins.until(failed_ns)
    begun = begun[(begun["phase"] == _EVAL) & (begun["depth"] == 0)]
    if not len(begun):
        return None
    begin_ns, rows = int(begun["time_ns"][-1]), spans.until(failed_ns)
    earlier = rows[(rows["phase"] == _EVAL) & (rows["end_ns"] <= begin_ns) & (rows["flags"] & FAILED == 0)]
    before = [
        _measure_evaluation(spans, readings, int(one["begin_ns"]), int(one["end_ns"]), has_ended=True)
        for one in earlier[-_MOST_EARLIER:]
    ]
    known = [one for one in before if one is not None]
    own = _measure_evaluation(spans, readings, begin_ns, failed_ns - spans.offset_ns)
    if own is None or not known:
        return None
    before_bytes = max(one.held_bytes for one in known)
    ratio = _compare_batches(own.batch, [one.batch for one in known])
    if held_bytes < _MORE_TIMES * before_bytes or ratio is None or ratio > LARGER_RATIO:
        return None
    left = [one.forward_bytes for one in known if one.forward_bytes is not None]
    return EvaluationGrowth(
        held_bytes,
        before_bytes,
        len(known),
        own.forwards,
        max(one.forwards for one in known),
        own.forward_bytes,
        max(left) if left else None,
        own.batch,
    )


def _measure_evaluation(
    spans: Source, readings: Source, begin_ns: int, end_ns: int, *, has_ended: bool = False
) -> _Evaluation | None:
    """Return the memory and forwards of an evaluation, with times of the process's own clock; None without readings."""
    begin_unix_ns, end_unix_ns = begin_ns + readings.offset_ns, end_ns + readings.offset_ns
    rows = readings.between(begin_unix_ns - 1, end_unix_ns)
    if not len(rows):
        return None
    # An evaluation ends with its last forward, but its metrics may need more: that is in the peak of the next reading.
    count = readings.count_until(end_unix_ns)
    after = readings.array[count : count + has_ended]
    held = max(int(part[name].max()) for part in (rows, after) if len(part) for name in _HELD)
    within = spans.between(begin_ns + spans.offset_ns - 1, end_ns + spans.offset_ns)
    forwards = within[(within["phase"] == _FORWARD) & (within["flags"] & EVAL != 0) & (within["begin_ns"] >= begin_ns)]
    levels = rows["allocated_bytes"][(rows["edge"] == END) & np.isin(rows["phase"], (_EVAL, _FORWARD))]
    left = int(np.median(np.diff(levels))) if len(levels) > 2 else None
    return _Evaluation(held, len(forwards), left, _read_largest(forwards))


def _read_largest(forwards: Any) -> dict[str, int]:
    known = forwards[forwards["rows"] > 0]
    if not len(known):
        return {}
    largest = known[int(np.argmax(np.maximum(known["tokens"], known["rows"])))]
    return {name: int(largest[name]) for name in ("rows", "sequence", "tokens") if largest[name] > 0}


def _compare_batches(own: dict[str, int], before: list[dict[str, int]]) -> float | None:
    """Return how many times as large a micro-batch is as the largest before; None if that is unknown."""
    for name in ("tokens", "rows"):
        sizes = [one[name] for one in before if name in one]
        if name in own and sizes:
            return own[name] / max(sizes)
    return None
