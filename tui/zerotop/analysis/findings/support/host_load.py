"""A node's memory and cores, as its samplers saw them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.findings.support.rank_process import AdvancingRecording, Process
from zerotop.analysis.findings.support.thresholds import TAKEN_BUSY_SHARE, TAKEN_SHARE, USED_SHARE
from zerotop.analysis.processes.cores import parse_cores
from zerotop.recording.moments.at import find_cores
from zerotop.recording.moments.host_memory import HostMemory, read_host_memory
from zerotop.recording.samples import Floats, Ints, read_column
from zerotop_probe.recording.events import Affinity

_MANY_SAMPLES = 3


def read_memory(recording: AdvancingRecording, host: str, time_ns: int) -> HostMemory | None:
    """Return a node's memory at a time; None if it was not sampled."""
    row = recording.at.records("hosts", host).read_last(time_ns)
    return read_host_memory(row, time_ns) if row is not None and row["memory_total_bytes"] > 0 else None


def is_host_short(process: Process, time_ns: int) -> bool:
    """Whether the memory of a rank's node is filled to USED_SHARE; true if that is unknown."""
    memory = read_memory(process.recording, process.host, time_ns)
    return memory is None or memory.used_bytes >= USED_SHARE * memory.limit_bytes


def count_workers(processes: Sequence[Process], begin_ns: int, end_ns: int) -> int:
    """Return the number of DataLoader workers of ranks in a time window, as far as they were counted."""
    samples = [one.host_samples.read_window(begin_ns, end_ns).rows for one in processes]
    counts = [read_column(rows, "loader_workers") for rows in samples]
    return sum(max(0, int(np.nan_to_num(count, nan=-1).max())) for count in counts if len(count))


class CoreLoad(NamedTuple):
    """The average load of a node's cores: numbers for one interval, or arrays for many, with NaN if unknown."""

    ranks: Any  # used by the job's ranks
    waiting: Any  # that runnable threads of the ranks waited for
    others: Any  # used by all other processes, DataLoader workers included
    cores: int

    @property
    def is_starved(self) -> Any:
        """Whether ranks wait for a notable share of the node's cores because other processes use them."""
        return self._is_taken & (self.waiting >= TAKEN_SHARE * self.cores)

    @property
    def is_disturbed(self) -> Any:
        """Whether ranks wait for a notable share of the cores that they want because other processes use them."""
        return self._is_taken & self.lacks_cores

    @property
    def lacks_cores(self) -> Any:
        """Whether ranks wait for a notable share of the cores that they want."""
        return self.waiting >= TAKEN_SHARE * self.wanted

    @property
    def wanted(self) -> Any:
        """Cores that the ranks' threads would use if they never waited for one."""
        return self.ranks + self.waiting

    @property
    def _is_taken(self) -> Any:
        is_full = self.ranks + self.others >= TAKEN_BUSY_SHARE * self.cores
        return is_full & (self.others >= TAKEN_SHARE * self.cores)


def measure_load(recording: AdvancingRecording, host: str, begin_ns: int, end_ns: int) -> CoreLoad | None:
    """Return the load of a node in a time window; None if it was not sampled."""
    records = recording.at.records("hosts", host)
    last, rows = records.read_last(end_ns), records.read_window(begin_ns, end_ns).rows
    used = rows["cores_used"] if len(rows) else np.array([] if last is None else [last["cores_used"]])
    used = used[~np.isnan(used)]
    if len(used) >= _MANY_SAMPLES:
        used = used[1:]  # the first one is of the time before, too
    if not len(used):
        return None
    loads = measure_loads(recording, host, np.array([begin_ns, end_ns]), np.array([used.mean()]))
    if loads is None or np.isnan(loads.ranks[0]):
        return None
    return CoreLoad(float(loads.ranks[0]), float(loads.waiting[0]), float(loads.others[0]), loads.cores)


def measure_spare_cores(process: Process, begin_ns: int, end_ns: int) -> float | None:
    """Return how many cores nobody uses of those that a rank and its workers may run on; None if that is not known.

    The ranks of a node share its spare cores.
    """
    load = measure_load(process.recording, process.host, begin_ns, end_ns)
    if load is None or np.isnan(load.others):
        return None
    ranks = len({source.rank for source in process.recording.at.host_sources("spans", process.host)})
    spare = float(load.cores - load.wanted - load.others) / max(1, ranks)
    events = process.recording.events_of(Affinity)
    bound = [event.cpus for event in events if event.process_key == process.key and event.unix_ns <= end_ns]
    rows = process.host_samples.read_window(begin_ns, end_ns).rows
    if bound and len(rows):
        used = sum(float(np.nan_to_num(read_column(rows, name)).mean()) for name in ("cores_used", "loader_cores"))
        spare = min(spare, len(parse_cores(bound[-1] or "")) - used)
    return spare


def measure_loads(recording: AdvancingRecording, host: str, edges: Ints, cores_used: Floats) -> CoreLoad | None:
    """Return the load of a node between consecutive times ``edges``, shape (n + 1,); None if it was not sampled.

    ``cores_used``: by all processes of the node, in each interval, shape (n,).
    """
    cores = find_cores(recording.at, host)
    sampled = recording.at.records("processes", host).read_window(int(edges[0]), int(edges[-1]))
    if cores is None or not len(sampled):
        return None
    indices = np.searchsorted(sampled.times, edges, "right")
    ticks = np.concatenate([[0], np.cumsum(np.diff(sampled.times, prepend=-1) != 0)])[indices]
    count = np.diff(ticks)
    # More than all cores: the job may use only some of the machine's, and the load of others on those is unknown.
    is_known = (count > 0) & (cores_used <= 1.1 * cores)
    count = np.where(is_known, count, np.nan)
    columns = (np.nan_to_num(sampled.rows[name]).astype(np.float64) for name in ("cores_used", "waiting_cores"))
    used, waiting = (np.diff(np.concatenate([[0.0], np.cumsum(column)])[indices]) / count for column in columns)
    return CoreLoad(used, waiting, np.maximum(0.0, cores_used - used), cores)
