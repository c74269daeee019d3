"""A rank's host memory grows steadily while it trains, and when it will run out.

Read from the resident memory that samplers saw in each step. Pages of files that the process maps count too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Process
from zerotop.analysis.annotations.support.fp16_warmup import count_skipped_first
from zerotop.analysis.annotations.support.host_load import read_memory
from zerotop.analysis.annotations.support.thresholds import HOST_GROWTH_BYTES
from zerotop.analysis.stats.change_points import SETTLED_STEPS
from zerotop.analysis.stats.trend import Rise, TrendFinder

_KIND = FindingKind(
    name="host_growth",
    severity=Severity.WARNING,
    confidence=0.8,
    sentence=(
        "Rank {rank}'s host memory grew by {grown_bytes:bytes} to {resident_bytes:bytes} in {steps:.0f} steps,"
        " {bytes_per_step:bytes} a step[: the {free_bytes:bytes} left on the node run out at about step {last_step:.0f}"
        "[ if all {node_ranks} ranks grow alike]]."
    ),
    advice="Keep no batches, outputs or losses in lists. If DataLoader workers grow, lower {worker_count_alone}.",
)
# A rise by at least this share of the memory before it.
HOST_GROWTH_SHARE = 0.02
# Memory hardly varies, so four blocks are enough; a cache that fills grows less and less.
HOST_GROWTH_BLOCKS = 4
HOST_GROWTH_EVENNESS = 0.8

_new_trend_finder = partial(TrendFinder, HOST_GROWTH_BLOCKS, HOST_GROWTH_EVENNESS)


def detect(recording: Evidence) -> Iterator[Annotation | None]:
    """Report each rise of each rank, again if it goes on for long; not what the first real step allocates."""
    for group in recording.groups:
        for process in group.processes:
            skipped = count_skipped_first(process)
            if skipped >= len(process.steps):
                continue
            values, begin = process.steps["host_rss_bytes"], skipped + SETTLED_STEPS
            finder = process.get_state(_new_trend_finder)
            for rise in finder.find_rises(values, begin, share=HOST_GROWTH_SHARE, least=HOST_GROWTH_BYTES):
                yield _build_finding(group, process, rise)


def _build_finding(group: Group, process: Process, rise: Rise) -> Annotation:
    rows = process.steps[rise.begin : rise.end]
    memory = read_memory(process.recording, process.host, int(rows["end_unix_ns"][-1]))
    ranks = len(group.processes_on(process.host))
    free = memory.limit_bytes - memory.used_bytes if memory is not None else None
    last_step = float(rows["step"][-1]) + max(0, free) / (rise.slope * ranks) if free is not None else None
    evidence = {
        "bytes_per_step": rise.slope,
        "grown_bytes": rise.high - rise.low,
        "resident_bytes": rise.high,
        "steps": len(rows),
        "free_bytes": free,
        "last_step": last_step,
    }
    return _KIND.at_steps(process, rows, evidence, node_ranks=ranks if ranks > 1 else None)
