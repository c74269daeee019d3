"""A node's memory and cores, as its samplers saw them.

The time in which a rank's training thread computed, and in which it waited for a core.

While the thread waits for other ranks in a gloo collective, it does neither. So both times tell a slow rank from those that
wait for it, even if the collectives are within the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.findings.support.evidence import Group, Process, Rows, Samples
from zerotop.analysis.findings.support.rank_process import AdvancingRecording
from zerotop.analysis.findings.support.thresholds import TAKEN_BUSY_SHARE, TAKEN_SHARE, USED_SHARE
from zerotop.analysis.processes.cores import parse_cores
from zerotop.recording.moments.at import find_cores
from zerotop.recording.moments.host_memory import HostMemory, read_host_memory
from zerotop.recording.samples import Floats, Ints, read_column
from zerotop_probe.recording.events import Affinity

# The longest distance (ns) from a time to its nearest samples: one each half second, a few of which may be late.
SAMPLED_NS = 1_500_000_000
# A slow rank computes this many times as long as the second: clean ones differ by up to 1.25 if others take cores.
SLOW_TIMES = 1.3
# Parts of steps whose median is what a thread usually does: how long they are (ns) at least, and how many.
_PART_NS, _FEWEST_PARTS, _MOST_PARTS = 700_000_000, 3, 9


class ThreadUse(NamedTuple):
    """The seconds in which a thread computed, and in which it was ready to run but had no core."""

    computed: float
    waited: float


def hides_slow_cores(group: Group) -> bool:
    """Whether ranks on CPUs wait for each other within forward and backward."""
    return group.gathers_parameters and not any(process.is_on_gpu for process in group.processes)


def measure_thread_use(process: Process, begin_ns: int, end_ns: int, *, known_ns: int | None = None) -> ThreadUse | None:
    """Return the use of a process's first thread from ``begin_ns`` to ``end_ns`` (unix nanoseconds).

    With ``known_ns`` only samples up to then are used, and scaled from the time that they cover to the whole time. None if
    it was not sampled long enough: the sampler leaves out threads that hardly run.
    """
    last_ns = end_ns + SAMPLED_NS if known_ns is None else min(known_ns, end_ns + SAMPLED_NS)
    begin, end = (_read_near(process, edge_ns, last_ns) for edge_ns in (begin_ns, end_ns))
    if not len(begin) or not len(end) or begin.times[0] > begin_ns:
        return None
    until_ns = min(end_ns, int(end.times[-1]))
    if until_ns < (end_ns if known_ns is None else (begin_ns + end_ns) // 2):
        return None
    scale = (end_ns - begin_ns) / (until_ns - begin_ns) / 1e9
    computed, waited = (
        (_interpolate(end, name, until_ns) - _interpolate(begin, name, begin_ns)) * scale for name in ("cpu_ns", "wait_ns")
    )
    return ThreadUse(computed, waited)


def find_longest_wait(
    processes: Sequence[Process], begin_ns: int, end_ns: int, *, known_ns: int
) -> tuple[int, float] | tuple[None, None]:
    """Return the rank whose first thread waits for a core longest, and the share of this time; None if it is not known.

    While its training thread waits, a rank goes no further; the others wait for it. Times as for measure_thread_use.
    """
    uses = {process.rank: measure_thread_use(process, begin_ns, end_ns, known_ns=known_ns) for process in processes}
    waits = {rank: use.waited * 1e9 / (end_ns - begin_ns) for rank, use in uses.items() if use is not None}
    slowest = max(waits, key=waits.__getitem__, default=None)
    return (None, None) if slowest is None else (slowest, waits[slowest])


def measure_usual_use(process: Process, steps: Rows, known_ns: int) -> ThreadUse | None:
    """Return the usual use of a process's first thread in one iteration: the median over parts of these steps.

    None if they take too short for that, or if it was not sampled all that time.
    """
    begin_ns, end_ns = int(steps["begin_unix_ns"][0]), int(steps["end_unix_ns"][-1])
    parts = min(_MOST_PARTS, len(steps), (end_ns - begin_ns) // _PART_NS)
    records = process.at.records("threads", process.host, "tid", process.source.pid)
    samples = records.read_window(begin_ns - SAMPLED_NS, min(end_ns + SAMPLED_NS, known_ns))
    is_covered = len(samples) > parts and samples.times[0] <= begin_ns and samples.times[-1] >= end_ns - SAMPLED_NS
    if parts < _FEWEST_PARTS or not is_covered:
        return None
    first = np.linspace(0, len(steps), parts + 1).astype(int)[:-1]
    edges_ns = np.append(steps["begin_unix_ns"][first], min(end_ns, samples.times[-1]))
    counts = np.diff(np.append(steps["step"][first], steps["step"][-1] + 1))
    # Small differences of large numbers, which floats would round.
    rises = (samples.rows[name] - samples.rows[name][0] for name in ("cpu_ns", "wait_ns"))
    used = (np.diff(np.interp(edges_ns - begin_ns, samples.times - begin_ns, rise)) for rise in rises)
    return ThreadUse(*(float(np.median(one / counts)) / 1e9 for one in used))


def _read_near(process: Process, time_ns: int, last_ns: int) -> Samples:
    """Return the samples of the first thread around a time, and up to ``last_ns``."""
    records = process.at.records("threads", process.host, "tid", process.source.pid)
    return records.read_window(time_ns - SAMPLED_NS, min(time_ns + SAMPLED_NS, last_ns))


def _interpolate(samples: Samples, name: str, time_ns: int) -> float:
    # Small differences of large numbers, which floats would round.
    base, values = int(samples.rows[name][0]), samples.rows[name] - samples.rows[name][0]
    return base + float(np.interp(time_ns - int(samples.times[0]), samples.times - samples.times[0], values))


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


def name_savings(processes: Sequence[Process], until_ns: int) -> dict[str, Any]:
    """Return values for templates in place of the script's terms for less host memory, where no rank has loader workers."""
    if not processes or count_workers(processes, processes[0].source.created_ns, until_ns):
        return {}
    if processes[0].engine.offload_optimizer == "cpu":
        return {"less_host_memory": "move the optimizer to NVMe"}
    return {"less_host_memory": "run fewer ranks on a node" if len(processes) > 1 else None, "less_host_memory_fix": ""}


def measure_worker_cores(processes: Sequence[Process], begin_ns: int, end_ns: int) -> float:
    """Return the cores that DataLoader workers of ranks used in a time window, as far as that was sampled."""
    samples = [one.host_samples.read_window(begin_ns, end_ns).rows for one in processes]
    return sum(float(np.nan_to_num(read_column(rows, "loader_cores")).mean()) for rows in samples if len(rows))


def count_children(processes: Sequence[Process], begin_ns: int, end_ns: int) -> tuple[int, float]:
    """Return how many processes of ranks there are at last that are no DataLoader workers, and the cores that these use.

    The cores are NaN where no sampler has measured them.
    """
    samples = [one.host_samples.read_window(begin_ns, end_ns).rows for one in processes]
    counts, cores = ([read_column(rows, name) for rows in samples] for name in ("child_processes", "child_cores"))
    used = [float(values[~np.isnan(values)][-1]) for values in cores if not np.isnan(values).all()]
    count = sum(max(0, int(np.nan_to_num(values[-1], nan=-1))) for values in counts if len(values))
    return count, sum(used) if used else float("nan")


class CoreLoad(NamedTuple):
    """The average load of a node's cores: numbers for one interval, or arrays for many, with NaN if unknown."""

    ranks: Any  # used by the job's ranks
    waiting: Any  # that runnable threads of the ranks waited for
    others: Any  # used by all other processes, those that the ranks have started included
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
