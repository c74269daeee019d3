"""A rank's host memory grows steadily while it trains: when it will not fit any more.

Read from the resident memory that samplers saw in each step. Pages of files that the process maps count too.
"""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity, build_step_finding
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Process
from zerotop.analysis.annotations.support.fp16_warmup import count_skipped_first
from zerotop.analysis.annotations.support.host_load import read_memory
from zerotop.analysis.annotations.support.thresholds import (
    HOST_GROWTH_BLOCKS,
    HOST_GROWTH_BYTES,
    HOST_GROWTH_EVENNESS,
    HOST_GROWTH_SHARE,
    SETTLED_STEPS,
)
from zerotop.analysis.formatting import format_bytes
from zerotop.analysis.stats.trend import Rise, TrendFinder


class _TrendFinder(TrendFinder):
    """Of a rank's resident memory."""

    def __init__(self) -> None:
        super().__init__(HOST_GROWTH_BLOCKS, HOST_GROWTH_EVENNESS)


def detect(facts: Evidence) -> Iterator[Annotation | None]:
    """One finding for each rank and rise, and again when it has gone on for long; not of what the first real step makes."""
    for group in facts.groups:
        for process in group.processes:
            yield PAUSE
            skipped = count_skipped_first(process)
            if skipped >= len(process.steps):
                continue
            values = process.steps["host_rss_bytes"]
            begin = skipped + SETTLED_STEPS
            trend = process.get_state(_TrendFinder)
            for rise in trend.find_rises(values, begin, share=HOST_GROWTH_SHARE, least=HOST_GROWTH_BYTES):
                yield _build_finding(group, process, rise)


def _build_finding(group: Group, process: Process, rise: Rise) -> Annotation:
    rows = process.steps[rise.begin : rise.end]
    known_ns, host = int(rows["end_unix_ns"][-1]), process.source.host
    evidence = {"bytes_per_step": rise.slope, "grown_bytes": rise.high - rise.low, "resident_bytes": rise.high}
    evidence["steps"] = float(len(rows))
    text = (
        f"Rank {process.rank}'s host memory grew by {format_bytes(rise.high - rise.low)} to {format_bytes(rise.high)} in {len(rows)} steps,"
        f" {format_bytes(rise.slope)} a step"
    )
    memory = read_memory(process.facts, host, known_ns)
    if memory is not None:
        ranks = sum(other.source.host == host for other in group.processes)
        left = memory.limit_bytes - memory.used_bytes
        evidence |= {"free_bytes": float(left), "last_step": float(rows["step"][-1]) + max(0, left) / (rise.slope * ranks)}
        text += f": if all {ranks} ranks of the node do that," if ranks > 1 else ":"
        text += f" {format_bytes(left)} that are left there are used up at about step {evidence['last_step']:.0f}"
    return build_step_finding(
        rows,
        name="host_growth",
        ranks=(process.rank,),
        severity=Severity.WARNING,
        confidence=0.8,
        sentence=text + ".",
        advice="Keep no batches, outputs or losses in lists; lower Trainer's dataloader_num_workers if those grow.",
        evidence=evidence,
    )
