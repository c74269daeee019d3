"""A rank's host memory grows steadily while it trains, and when it will run out.

Read from the memory that samplers saw in each step. Pages of files do not count: the kernel drops them when memory is short.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from zerotop.analysis.findings.host.growing_containers import FoundContainer, await_container
from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, in_each_attempt
from zerotop.analysis.findings.support.host_load import count_workers, read_memory
from zerotop.analysis.findings.support.steps.fp16_warmup import count_skipped_first
from zerotop.analysis.findings.support.thresholds import HOST_GROWTH_BYTES
from zerotop.analysis.stats.change_points import SETTLED_STEPS
from zerotop.analysis.stats.trend import Rise, TrendFinder
from zerotop.recording.samples import Rows, read_column

_KIND = FindingKind(
    name="host_growth",
    confidence=0.8,
    host_bytes="grown_bytes",
    headline=(
        "Host memory grows {bytes_per_step:bytes} a step[ in '{kept_in}'] on {concerned:ranks}"
        "[; full near step {last_step:.0f}]"
    ),
    details=(
        "Rank {rank}'s memory grew by {grown_bytes:bytes} to {resident_bytes:bytes} in {steps:.0f} steps[;"
        " {free_bytes:bytes} are left on the node[, for {node_ranks} ranks]].[ {shared_bytes:bytes} of the growth are shared"
        " memory.]"
    ),
    advice="Keep no batches, outputs or losses in lists.[ If DataLoader workers grow, lower {worker_count}.]",
    fix="losses.append(loss.item())",
    lasts=True,
)
# Most of the growth is shared memory: tensors of share_memory_() and from DataLoader workers, files on /dev/shm.
_SHARED = _KIND.with_changes(
    advice="Batches from DataLoader workers are shared memory: keep none in lists. Delete files on /dev/shm after use.",
)
# A rise by at least this share of the memory before it.
HOST_GROWTH_SHARE = 0.02
# Memory hardly varies, so four blocks are enough. A cache that fills up grows more and more slowly.
HOST_GROWTH_BLOCKS = 4
HOST_GROWTH_EVENNESS = 0.8
# Rises that differ by less than this share have the same cause.
_ALIKE = 2.0


@dataclass
class _Reported:
    """The last finding of a group: its times, the other ranks in it, and bytes a step of each rank that has grown."""

    ranks: list[int] = field(default_factory=list)
    begin_ns: int = 0
    end_ns: int = 0
    slopes: dict[int, float] = field(default_factory=dict)

    def has_slope(self, rank: int, slope: float) -> bool:
        """Whether a finding already says that a rank's memory grows about as fast."""
        return self.slopes.get(rank, 0.0) / _ALIKE < slope < self.slopes.get(rank, 0.0) * _ALIKE


_new_trend_finder = partial(TrendFinder, HOST_GROWTH_BLOCKS, HOST_GROWTH_EVENNESS)


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each rise, and again if it becomes steeper.

    Ranks whose memory rises alike share one finding. The rise in the first real step is left out.
    """
    for (process, rise, ranks), held in window.await_each(_find_new(window), _await_container):
        yield _build_finding(window.subject, process, rise, ranks, held)


def _find_new(window: SearchWindow[Group]) -> Iterator[tuple[Process, Rise, list[int]]]:
    group, last = window.subject, window.keep(_Reported)
    found = [(process, rise) for process in group.processes for rise in _find_rises(window, process)]
    for process, rise in sorted(found, key=lambda one: (_find_end(*one), one[0].rank)):
        if last.has_slope(process.rank, rise.slope):
            continue
        begin_ns = int(process.steps["begin_unix_ns"][rise.begin])
        if process.rank in last.ranks and begin_ns <= last.end_ns - (last.end_ns - last.begin_ns) // 2:
            last.ranks.remove(process.rank)  # a later rise of this rank is a finding again
            continue
        known_ns = _find_end(process, rise)
        if not _is_memory_new(process, rise):
            continue
        ranks = [other.rank for other in group.processes if _rises_alike(other, process, rise, known_ns)]
        last.ranks = [rank for rank in ranks if rank != process.rank]
        last.begin_ns, last.end_ns = begin_ns, known_ns
        last.slopes.update(dict.fromkeys(ranks, rise.slope))
        yield process, rise, ranks


def _find_rises(window: SearchWindow[Group], process: Process) -> Iterable[Rise]:
    skipped = count_skipped_first(process)
    if skipped >= len(process.steps):
        return ()
    values, begin = process.steps["host_held_bytes"], skipped + SETTLED_STEPS
    finder = window.keep(_new_trend_finder, process)
    return finder.find_rises(values, begin, share=HOST_GROWTH_SHARE, least=HOST_GROWTH_BYTES)


def _measure_shared(process: Process, rise: Rise) -> int:
    """Return the growth of the rank's shared memory in the steps of a rise."""
    before = process.host_samples.read_last(int(process.steps["end_unix_ns"][rise.begin]))
    after = process.host_samples.read_last(_find_end(process, rise))
    return int(after["shared_bytes"]) - int(before["shared_bytes"]) if before is not None and after is not None else 0


def _is_memory_new(process: Process, rise: Rise) -> bool:
    """Whether the node uses more memory: pages of shared memory that another process has filled cost nothing to map."""
    shared = _measure_shared(process, rise)
    if shared <= (rise.high - rise.low) / 2:
        return True
    records = process.at.records("hosts", process.host)
    begin_ns, end_ns = int(process.steps["end_unix_ns"][rise.begin]), _find_end(process, rise)
    rows = records.read_window(begin_ns, end_ns).rows
    sizes = read_column(rows, "shared_bytes")
    return len(sizes) < 2 or not sizes[-1] - sizes[0] < shared / 2  # NaN: an older recording


def _measure_slope(group: Group, process: Process, rows: Rows) -> float:
    """Return the bytes a step by which all ranks of the node have grown in these steps of one of them."""
    grown = 0
    for other in group.processes_on(process.host):
        held = other.steps_until(int(rows["end_unix_ns"][-1]))
        held = held[held["step"] >= rows["step"][0]]["host_held_bytes"]
        grown += max(0, int(held[-1]) - int(held[0])) if len(held) else 0
    return max(1.0, grown / max(1, len(rows) - 1))


def _find_end(process: Process, rise: Rise) -> int:
    return int(process.steps["end_unix_ns"][rise.end - 1])


def _rises_alike(other: Process, process: Process, rise: Rise, known_ns: int) -> bool:
    """Whether a rank's memory grew in the same steps by about as much."""
    if other is process:
        return True
    rows = other.steps_until(known_ns)
    rows = rows[rows["step"] >= process.steps["step"][rise.begin]]
    if len(rows) < 2 or other.host != process.host:
        return False
    grown = int(rows["host_held_bytes"][-1]) - int(rows["host_held_bytes"][0])
    return bool((rise.high - rise.low) / 2 < grown < (rise.high - rise.low) * 2)


def _await_container(one: tuple[Process, Rise, list[int]]) -> FoundContainer | None:
    process, rise, _ = one
    return await_container(process, int(process.steps["begin_unix_ns"][rise.begin]), _find_end(process, rise))


def _build_finding(group: Group, process: Process, rise: Rise, ranks: list[int], held: FoundContainer) -> Finding:
    rows = process.steps[rise.begin : rise.end]
    memory = read_memory(process.recording, process.host, int(rows["end_unix_ns"][-1]))
    node_ranks = len(group.processes_on(process.host))
    free = memory.limit_bytes - memory.used_bytes if memory is not None else None
    node_slope = _measure_slope(group, process, rows)
    last_step = float(rows["step"][-1]) + max(0, free) / node_slope if free is not None else None
    is_shared = (shared_bytes := _measure_shared(process, rise)) > (rise.high - rise.low) / 2
    evidence = {
        "bytes_per_step": rise.slope,
        "grown_bytes": rise.high - rise.low,
        "resident_bytes": rise.high,
        "steps": len(rows),
        "free_bytes": free,
        "last_step": last_step,
        "shared_bytes": shared_bytes if is_shared else None,
    }
    sharers = node_ranks if node_ranks > 1 else None
    kind, container = _SHARED if is_shared else _KIND, held.container
    kind = container.name_in(kind) if container is not None else kind
    values = {"kept_in": container.name, **container.values} if container is not None else {"kept_in": None}
    if not count_workers([process], int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])):
        values["worker_count"] = None
    return kind.at_steps(process, rows, evidence, ranks=ranks, concerned=ranks, node_ranks=sharers, **values)
