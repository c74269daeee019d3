"""Why a rank waits for its data: what its DataLoader workers do meanwhile."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerotop.analysis.annotations.support.causes.step_change import Advice
from zerotop.analysis.annotations.support.evidence import Process
from zerotop.analysis.annotations.support.record_window import read_column
from zerotop.analysis.formatting import Text, pluralize

# Shares of the workers: that wait for the disk at a moment, that wait for a core, that compute.
_BLOCKED_SHARE, _WAITING_SHARE, _BUSY_SHARE = 0.5, 0.25, 0.75
# Of workers that hardly run, less computes or waits for a core.
_AWAKE_SHARE = 0.5

_DISK: Advice = ("Read from a faster disk, or keep what is read in memory: more workers would wait too.", "")
_CORES: Advice = ("Give the job more cores, or start fewer workers: those that it has wait for cores.", "")
_MORE_CORES: Advice = ("Give the job more cores: its only worker waits for one.", "")
_ASLEEP: Advice = (
    "See what the workers wait for: more of them help where each waits for its own file or server, but not where all wait for"
    " one lock.",
    "py-spy dump --pid $(pgrep -P {pid} | head -1)",
)


class LoaderCause(NamedTuple):
    """What the workers do, as a clause, and what helps; no advice where more workers help."""

    text: Text
    advice: Advice | None = None


def find_loader_cause(process: Process, begin_ns: int, end_ns: int) -> LoaderCause | None:
    """Return what the workers of a rank did in a time window; None if that is unknown."""
    rows = process.host_samples.read_window(begin_ns, end_ns).rows
    workers = read_column(rows, "loader_workers") if len(rows) else np.empty(0)
    rows, workers = rows[workers >= 0], workers[workers >= 0]
    if not len(rows):
        return None
    count = float(np.median(workers))
    if not count:
        return LoaderCause(Text("it has no loader worker", {}))
    names = ("loader_cores", "loader_waiting_cores", "loader_blocked")
    used, waiting, blocked = (float(np.nan_to_num(read_column(rows, name)).mean()) for name in names)
    is_one = round(count) == 1
    verbs = {"use": "uses", "wait": "waits", "run": "runs"} if is_one else {"use": "use", "wait": "wait", "run": "run"}
    values = {"count": count, "workers": pluralize(round(count), "loader worker"), **verbs, "used": used, "blocked": blocked}
    if blocked >= _BLOCKED_SHARE * count:
        return LoaderCause(Text("of {count:.0f} {workers} {blocked:.1f} wait for the disk", values), _DISK)
    # One that lacks a core is always runnable; one that sleeps or waits for something else is not.
    if waiting >= _WAITING_SHARE * count and used + waiting >= _BUSY_SHARE * count:
        return LoaderCause(
            Text("{count:.0f} {workers} {use} {used:.1f} cores and {wait} for more", values),
            _CORES if count > 1 else _MORE_CORES,
        )
    if used >= _BUSY_SHARE * count:
        return LoaderCause(Text("{count:.0f} {workers} {use} {used:.1f} cores: each is busy", values))
    text = "{count:.0f} {workers} {use} {used:.1f} cores"
    if used + waiting < _AWAKE_SHARE * count:
        return LoaderCause(Text(f"{text}, and hardly {{run}}", values), _ASLEEP)
    return LoaderCause(Text(text, values))
