"""What a range of time comes to, for one rank, its GPU and its host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.timeline.metrics import SampleColumns
from zerotop.analysis.timeline.resample import HIGHEST, SUM, TIME, Table, merge_tables
from zerotop.analysis.timeline.step_lane import IterationColumns, StepTimes
from zerotop.analysis.timeline.timeline import Lanes, Subject, TimelineBuilder
from zerotop.analysis.timeline.timeline_cache import ColumnCache
from zerotop_probe.recording.tables import PHASES

# Ranges up to this long are read record by record; of longer ones only the ends are.
_RAW_NS = 120_000_000_000
_COLUMN_NS = 10_000_000_000


@dataclass(frozen=True, slots=True, eq=False)
class RangeSummary:
    """A range; ``mean`` (over time, of iterations over steps) and ``highest`` are as ``Timeline.values`` has them."""

    begin_ns: int
    end_ns: int
    steps: int  # that the rank finished in it
    mean: dict[str, float]
    highest: dict[str, float]
    phase_s: dict[str, float]  # seconds in which the rank was in each phase


def summarize_range(timelines: TimelineBuilder, subject: Subject, begin_ns: int, end_ns: int) -> RangeSummary:
    """The range between two moments in unix time, the second one later."""
    timelines.update([subject.rank])
    lanes = timelines.get_lanes(subject)
    mean, highest = _summarize_values(lanes, timelines.origin_ns, begin_ns, end_ns)
    took = _read_iteration_seconds(timelines.get_step_times(subject.rank), begin_ns, end_ns)
    if len(took):
        mean["iteration"], highest["iteration"] = float(took.mean()), float(took.max())
    seconds = timelines.get_rank_phases(subject.rank).read_columns(np.array([begin_ns, end_ns]))[:, 0]
    phase_s = {name: float(amount) for name, amount in zip(PHASES, seconds, strict=True) if amount > 0}
    return RangeSummary(begin_ns, end_ns, len(took), mean, highest, phase_s)


def _summarize_values(lanes: Lanes, origin_ns: int, begin_ns: int, end_ns: int) -> tuple[dict[str, float], dict[str, float]]:
    mean: dict[str, float] = {}
    highest: dict[str, float] = {}
    for teller, blocks in zip(lanes.column_sources, lanes.column_caches, strict=True):
        if not isinstance(teller, IterationColumns):
            table = _read_range(teller, blocks, origin_ns, begin_ns, end_ns)
            for place, name in enumerate(teller.names):
                if table[TIME, place, 0] > 0:
                    mean[name] = float(table[SUM, place, 0] / table[TIME, place, 0])
                    highest[name] = float(table[HIGHEST, place, 0])
    return mean, highest


def _read_range(source: SampleColumns, cache: ColumnCache, origin_ns: int, begin_ns: int, end_ns: int) -> Table:
    """The range as one column."""
    first, beyond = -((origin_ns - begin_ns) // _COLUMN_NS), (end_ns - origin_ns) // _COLUMN_NS
    if end_ns - begin_ns <= _RAW_NS:
        return source.read_columns(np.array([begin_ns, end_ns]))
    inner = cache.get_columns(_COLUMN_NS, first, beyond - first, end_ns=end_ns, until_s=math.inf)
    table = source.merge_columns(inner, beyond - first)
    for edges in ((begin_ns, origin_ns + first * _COLUMN_NS), (origin_ns + beyond * _COLUMN_NS, end_ns)):
        if edges[1] > edges[0]:
            table = merge_tables(table, source.read_columns(np.array(edges)))
    return table


def _read_iteration_seconds(
    steps: Sequence[StepTimes], begin_ns: int, end_ns: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Seconds that those iterations took that were finished in the range."""
    found = [times.read_finished_seconds(begin_ns, end_ns) for times in steps]
    return np.concatenate(found) if found else np.empty(0)
