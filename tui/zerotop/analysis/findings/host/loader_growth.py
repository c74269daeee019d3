"""The DataLoader workers of a rank keep more and more memory: their dataset or collate function collects something."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, in_each_attempt
from zerotop.analysis.findings.support.host_load import count_workers, read_memory
from zerotop.analysis.findings.support.steps.step_values import StepValues
from zerotop.analysis.stats.change_points import SETTLED_STEPS
from zerotop.analysis.stats.trend import Rise, TrendFinder, measure_rise
from zerotop.recording.samples import Ints, Rows, read_column

_KIND = FindingKind(
    name="loader_growth",
    confidence=0.85,
    host_bytes="grown_bytes",
    headline="DataLoader workers keep {bytes_per_step:bytes} more a step[; full near step {last_step:.0f}]",
    details=(
        "The {workers:count worker} of rank {rank} grew by {grown_bytes:bytes} to {held_bytes:bytes} in {steps:.0f} steps[;"
        " {free_bytes:bytes} are left on the node]."
    ),
    advice="Keep nothing in the dataset, its transforms or the collate function: each worker fills a copy of its own. In a"
    " short run without workers, zerotop can name the list.",
    fix="num_workers=0",
    lasts=True,
)
# A rise by at least these bytes, and this share of the memory before it: pages that are shared after a fork become the
# workers' own when they are touched.
_LEAST_BYTES, _LEAST_SHARE = 512 << 20, 0.5
_BLOCKS, _EVENNESS = 4, 0.8
# A sample of the workers counts for the steps of so long after it.
_SAMPLED_NS = 2_000_000_000

_new_trend_finder = partial(TrendFinder, _BLOCKS, _EVENNESS)


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report the rise of the first rank's workers that shows one, and again as it goes on; other ranks read the same way."""
    told = {rank for one in window.subject.findings if one.name == _KIND.name for rank in one.ranks}
    for process in window.subject.processes:
        if told - {process.rank}:
            continue
        values = StepValues(process.steps, partial(_read_workers, process))
        finder = window.keep(_new_trend_finder, process)  # reads each step once
        rises = finder.find_rises(values, SETTLED_STEPS, share=_LEAST_SHARE, least=_LEAST_BYTES)
        for rise in window.extend(partial(_follow, rises), 0, process):
            told.add(process.rank)
            yield _build_finding(window.subject, process, rise)


def _follow(rises: Iterator[Rise], last: Rise | None) -> Rise | None:
    """Return the next of the rises, from where it began."""
    rise = next(rises, None)
    return rise._replace(begin=last.begin, low=last.low) if rise is not None and last is not None else rise


def _read_workers(process: Process, steps: Rows) -> Ints:
    """Return the bytes that workers alone hold at the end of each step; -1 where they are unknown."""
    ends_ns = steps["end_unix_ns"].astype(np.int64)
    samples = process.host_samples.read_window(int(ends_ns[0]) - _SAMPLED_NS, int(ends_ns[-1]))
    if not len(samples):
        return np.full(len(steps), -1)
    sizes, counts = (read_column(samples.rows, name) for name in ("loader_private_bytes", "loader_workers"))
    known = np.where((counts > 0) & (sizes > 0), sizes, -1)
    last = np.searchsorted(samples.times, ends_ns, "right") - 1
    is_recent = (last >= 0) & (ends_ns - samples.times[last] < _SAMPLED_NS)
    found: Ints = np.where(is_recent, known[last], -1).astype(np.int64)
    return found


def _build_finding(group: Group, process: Process, rise: Rise) -> Finding:
    rows, values = process.steps[rise.begin : rise.end], StepValues(process.steps, partial(_read_workers, process))
    grown, held = measure_rise(values, rise)
    begin_ns, end_ns = int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])
    memory = read_memory(process.recording, process.host, end_ns)
    free = max(0, memory.limit_bytes - memory.used_bytes) if memory is not None else None
    slope = rise.slope * len(group.processes_on(process.host))
    evidence = {
        "bytes_per_step": rise.slope,
        "grown_bytes": grown,
        "held_bytes": held,
        "steps": len(rows),
        "workers": count_workers([process], begin_ns, end_ns),
        "free_bytes": free,
        "last_step": float(rows["step"][-1]) + free / slope if free is not None else None,
    }
    return _KIND.at_steps(process, rows, evidence)
