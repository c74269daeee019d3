"""Means, maxima and phases of a range of time, for one rank, its GPU and its host."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.timeline.resample import HIGHEST, SUM, TIME, SeriesColumns, Table, merge_tables
from zerotop.analysis.timeline.step_lane import IterationColumns
from zerotop.analysis.timeline.timeline import Lanes, LaneSubject, TimelineBuilder
from zerotop.analysis.timeline.timeline_cache import ColumnCache
from zerotop_probe.recording.tables import PHASES

# Ranges up to this long are read from records; longer ones from cached columns, except their ends.
_RAW_NS = 120_000_000_000
_COLUMN_NS = 10_000_000_000


@dataclass(frozen=True, slots=True, eq=False)
class RangeSummary:
    """Values of a range, named as in ``Timeline.values``. Means are over time, except of iterations: over steps."""

    begin_ns: int
    end_ns: int
    steps: int  # that the rank finished in it
    mean: dict[str, float]
    highest: dict[str, float]
    phase_s: dict[str, float]  # seconds of the rank in each phase


def summarize_range(timelines: TimelineBuilder, subject: LaneSubject, begin_ns: int, end_ns: int) -> RangeSummary:
    """Return the summary between two moments in unix time, the second one later."""
    timelines.update([subject.rank])
    lanes = timelines.get_lanes(subject)
    mean, highest = _summarize_values(lanes, timelines.origin_ns, begin_ns, end_ns)
    steps = timelines.get_step_times(subject.rank)
    iteration_s = np.concatenate([np.empty(0), *(times.read_finished_seconds(begin_ns, end_ns) for times in steps)])
    if len(iteration_s):
        mean["iteration"], highest["iteration"] = float(iteration_s.mean()), float(iteration_s.max())
    seconds = timelines.get_ribbon(subject.rank)[0].read_columns(np.array([begin_ns, end_ns]))[:, 0]
    phase_s = {name: float(amount) for name, amount in zip(PHASES, seconds, strict=True) if amount > 0}
    return RangeSummary(begin_ns, end_ns, len(iteration_s), mean, highest, phase_s)


def _summarize_values(lanes: Lanes, origin_ns: int, begin_ns: int, end_ns: int) -> tuple[dict[str, float], dict[str, float]]:
    mean: dict[str, float] = {}
    highest: dict[str, float] = {}
    for source, cache in zip(lanes.column_sources, lanes.column_caches, strict=True):
        if not isinstance(source, IterationColumns):
            table = _read_range(source, cache, origin_ns, begin_ns, end_ns)[..., 0]
            for row, name in enumerate(source.names):
                if table[TIME, row] > 0:
                    mean[name] = float(table[SUM, row] / table[TIME, row])
                    highest[name] = float(table[HIGHEST, row])
    return mean, highest


def _read_range(source: SeriesColumns, cache: ColumnCache, origin_ns: int, begin_ns: int, end_ns: int) -> Table:
    """Return the range as one column."""
    first, end = -((origin_ns - begin_ns) // _COLUMN_NS), (end_ns - origin_ns) // _COLUMN_NS
    if end_ns - begin_ns <= _RAW_NS:
        return source.read_columns(np.array([begin_ns, end_ns]))
    inner = cache.get_columns(_COLUMN_NS, first, end - first, end_ns=end_ns, until_s=math.inf)
    table = source.merge_columns(inner, end - first)
    for edges in ((begin_ns, origin_ns + first * _COLUMN_NS), (origin_ns + end * _COLUMN_NS, end_ns)):
        if edges[1] > edges[0]:
            table = merge_tables(table, source.read_columns(np.array(edges)))
    return table
