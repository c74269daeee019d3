"""The cost of watching at a cursor: the probe's own time, and the number of records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from zerotop.analysis.formatting import format_percent
from zerotop.analysis.live_view import Cost
from zerotop.analysis.views.job_exit import Losses
from zerotop.recording.moments.at import At
from zerotop.recording.samples import Rows
from zerotop.recording.table_files import Source

# What the probe's work delays otherwise, as by its use of the processor's caches, is not in its measurement.
_LEAST_SHARE = 0.001


def describe_share(share: float) -> str:
    """Return the share of the time that watching takes, in words."""
    if share < _LEAST_SHARE:
        return f"less than {format_percent(_LEAST_SHARE, 1)} of the time, below what can be measured"
    return f"{format_percent(share, 2)} of the time"


def measure_cost(at: At, losses: Losses) -> Cost:
    """Return the cost at a cursor in unix time."""
    shares, once_s, errors = [], [], 0
    for source in at.sources["probe"]:
        known = source.count_until(at.cursor_ns)
        if known:
            first, last = source.array[max(0, known - 100)], source.array[known - 1]
            errors += int(last["errors"])
            span = int(last["time_ns"]) - int(first["time_ns"])
            if span > 0:
                shares.append(max(0, int(last["cost_ns"]) - int(first["cost_ns"])) / span)  # older probes recorded less
            if "one_time_ns" in (source.array.dtype.names or ()):
                once_s.append(int(last["one_time_ns"]) / 1e9)
    return Cost(
        probe_share=_compute_mean(shares),
        one_time_s=max(once_s, default=math.nan),
        lost_records=losses.records,
        errors=errors,
        records=sum(source.count_written(at.cursor_ns) for sources in at.sources.values() for source in sources),
    )


def measure_work_in_slowest(probes: Sequence[Source], rows: Rows) -> float:
    """Return the seconds of the probe's own one-time work in the slowest of some steps (STEP_DTYPE); 0 where unknown.

    The work is known of the times between two records: it was in that step if each other one meanwhile was shorter.
    """
    if np.isnan(rows["iteration_s"]).all():
        return 0.0
    at = int(np.nanargmax(rows["iteration_s"]))
    slowest, work_s = rows[at], 0.0
    for source in probes:
        records = source.array
        if source.rank != slowest["rank"] or "one_time_ns" not in (records.dtype.names or ()):
            continue
        times = source.unix_times(records)
        rises = np.diff(records["one_time_ns"]) / 1e9
        for place in np.flatnonzero((times[1:] > slowest["begin_unix_ns"]) & (times[:-1] < slowest["end_unix_ns"])):
            is_meanwhile = (rows["end_unix_ns"] > times[place]) & (rows["begin_unix_ns"] < times[place + 1])
            is_meanwhile[at] = False
            others = rows["iteration_s"][is_meanwhile]
            if others.max(initial=0.0) < rises[place] <= slowest["iteration_s"]:  # no NaN
                work_s = max(work_s, float(rises[place]))
    return work_s


def _compute_mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else math.nan
