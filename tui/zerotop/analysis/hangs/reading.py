"""Ranks that read batch after batch and train with none of them, while the others wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.samples import Samples
from zerotop_probe.recording.tables import ANOTHER_ITERATOR, PHASE_CODE

_DATA = PHASE_CODE["data"]
# A rank reads without training if it has read so many batches, up to now, which took so much of the time.
_LEAST_READS = 20
_LEAST_SHARE = 0.25
_CHUNK = 1 << 14  # records that are searched at once


class Reading(NamedTuple):
    """A time in which some ranks only read batches, and the others did nothing."""

    since_ns: int  # unix time
    readers: tuple[int, ...]  # their positions among the ranks


def list_training(part: Samples) -> NDArray[np.int64]:
    """Return the times of records of phases, without those of reading data."""
    return part.times[part.rows["phase"] != _DATA] if len(part) else part.times


def find_last_training(rows: NDArray[np.void]) -> int:
    """Return the index of the last record of a phase other than reading data; -1 without one."""
    for end in range(len(rows), 0, -_CHUNK):
        begin = max(0, end - _CHUNK)
        if len(found := np.flatnonzero(rows["phase"][begin:end] != _DATA)):
            return begin + int(found[-1])
    return -1


def count_reads(spans: Samples) -> int:
    """Return how many batches were read, but for those of an evaluation or of statistics: they have their own iterators."""
    return len(_select_reads(spans))


def _select_reads(spans: Samples) -> Samples:
    if not len(spans):
        return spans
    return spans.select((spans.rows["phase"] == _DATA) & (spans.rows["flags"] & ANOTHER_ITERATOR == 0))


def find_reading(begins: Sequence[Samples], spans: Sequence[Samples], since_ns: int, until_ns: int) -> Reading | None:
    """Return which ranks, by position, have only read batches for a time in which the others did nothing; None if none have.

    ``begins``, ``spans``: of each rank, after ``since_ns`` and before ``until_ns``, without phases other than reading data.
    """
    readers = tuple(index for index, part in enumerate(spans) if _only_reads(part, since_ns, until_ns))
    quiet = [part for index in range(len(spans)) if index not in readers for part in (begins[index], spans[index])]
    if not readers or not quiet:
        return None
    return Reading(max((int(part.times[-1]) for part in quiet if len(part)), default=since_ns), readers)


def _only_reads(spans: Samples, since_ns: int, until_ns: int) -> bool:
    period_ns, spans = until_ns - since_ns, _select_reads(spans)
    if len(spans) < _LEAST_READS or until_ns - int(spans.times[-1]) > _LEAST_SHARE * period_ns:
        return False
    return int((spans.rows["end_ns"] - spans.rows["begin_ns"]).sum()) >= _LEAST_SHARE * period_ns
