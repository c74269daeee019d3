"""The GPU of one rank runs at a lower clock than the others, whose ranks wait for it when they exchange tensors.

Under ZeRO-3 and FSDP this wait is spread over all phases of all ranks, so the times of phases do not show the slow rank. The
clocks do: while they compute, the GPUs of a job differ by less than 1 %, even if some wait in NCCL's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Evidence, Finding, FindingKind, Group, Process, SearchWindow, in_each_attempt
from zerotop.analysis.findings.support.lines.stack_lines import find_deadline
from zerotop.analysis.findings.support.links import Kinds, is_simultaneous
from zerotop.analysis.findings.support.steps.contests import find_slow_rounds
from zerotop.analysis.findings.support.thresholds import THROTTLE_REASONS
from zerotop.recording.moments.devices import find_gpu_name
from zerotop.recording.samples import Floats, read_column

_KIND = FindingKind(
    name="slow_clock",
    confidence=0.8,
    headline="The GPU of rank {rank} runs at {sm_clock_mhz:.0f} MHz, those of the others at {others_clock_mhz:.0f}",
    details=(
        "Where ranks synchronize, all wait for the slowest one. Work that the clock limits takes up to"
        " {slower_share:percent} longer.[ NVML's reason: {names}.]"
    ),
    advice="See what limits the clocks of this GPU: power, heat, or a clock that was set.",
    fix="nvidia-smi -q -d CLOCK,PERFORMANCE -i {gpu}",
    explained_by=(Kinds(is_simultaneous, "throttled"),),
)
# The clocks of equal GPUs with equal work stay within a few percent of each other, even at their power limit.
_LOWER = 0.9
# An idle GPU lowers its clock by itself. Utilization (percent) is of the last 200 ms.
_COMPUTING_PERCENT = 20.0
# Each round lasts this long (ns), later ones longer by a share of the training before them, so that a long recording has
# few more. Two in a row must show the same rank. In each, every GPU must have this many samples.
_ROUND_NS, _LONGER, _SAMPLES = 5_000_000_000, 0.01, 5
# Reasons for a lower clock that are no throttling.
_REASONS = {0x02: "clocks that were set", 0x04: "the power limit", **THROTTLE_REASONS}
# Samples of all GPUs are taken at the same time, and written a little later (ns).
_LATE_NS = 1_000_000_000


class _Round(NamedTuple):
    """The clocks of the GPUs in a window of time."""

    first_ns: int  # of the training
    begin_ns: int
    end_ns: int
    known_ns: int
    clocks: Floats  # by rank
    slow: int  # index of the rank with the slow GPU; -1 for none


@in_each_attempt()
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report once for each attempt: the first rank whose GPU was slow in two rounds in a row."""
    group = window.subject
    if len(group.processes) < 2 or not _have_own_gpus(group) or not _are_of_one_kind(window.recording, group):
        return
    rounds = window.extend(partial(_measure_round, group), 1)
    found = find_slow_rounds([one.slow for one in rounds], 2)
    if found is not None:
        first, last = rounds[found]
        yield _build_finding(group.processes[last.slow], last, first.begin_ns)


def _have_own_gpus(group: Group) -> bool:
    """Whether each rank has a GPU for itself."""
    keys = {process.gpu_key for process in group.processes}
    return None not in keys and len(keys) == len(group.processes) and all(len(one.steps) for one in group.processes)


def _are_of_one_kind(recording: Evidence, group: Group) -> bool:
    names = {find_gpu_name(recording.at, process.gpu_key) for process in group.processes if process.gpu_key is not None}
    return len(names) == 1


def _measure_round(group: Group, before: _Round | None) -> _Round | None:
    """Return the round after another one; None before it is known."""
    first_ns = before.first_ns if before is not None else max(int(one.steps["end_unix_ns"][0]) for one in group.processes)
    begin_ns = before.end_ns if before is not None else first_ns
    end_ns = begin_ns + max(_ROUND_NS, int(_LONGER * (begin_ns - first_ns)))
    known_ns = max(find_deadline(process, end_ns, _LATE_NS) for process in group.processes)
    if known_ns > min(group.lead.at.cursor_ns, group.lead.at.recording.last_written_ns):
        return None
    clocks = np.array([_measure_clock(process, begin_ns, end_ns) for process in group.processes])
    return _Round(first_ns, begin_ns, end_ns, known_ns, clocks, _find_slow(clocks))


def _measure_clock(process: Process, begin_ns: int, end_ns: int) -> float:
    """Return the median clock of a rank's GPU while it computed; NaN if it computed too briefly."""
    samples = process.gpu_samples.read_window(begin_ns, end_ns)
    if not len(samples):
        return float("nan")
    clocks = samples.rows["sm_clock_mhz"][samples.rows["utilization_percent"] >= _COMPUTING_PERCENT]
    clocks = clocks[~np.isnan(clocks)]
    return float(np.median(clocks)) if len(clocks) >= _SAMPLES else float("nan")


def _find_slow(clocks: Floats) -> int:
    """Return the index of the clock that is far below all others; -1 if there is none, or one is unknown."""
    slowest, second = np.partition(clocks, 1)[:2].tolist()
    # Unknown clocks are NaN, which compares false.
    is_slow = not np.isnan(clocks).any() and slowest < _LOWER * second
    return int(np.argmin(clocks)) if is_slow else -1


def _build_finding(process: Process, last: _Round, begin_ns: int) -> Finding:
    clock, others = float(last.clocks[last.slow]), float(np.median(np.delete(last.clocks, last.slow)))
    rows = process.gpu_samples.read_window(begin_ns, last.end_ns).rows
    masks = read_column(rows, "throttle_reasons")
    names = [name for bit, name in _REASONS.items() if np.mean((np.maximum(masks, 0).astype(np.int64) & bit) > 0) > 0.5]
    share = others / clock - 1
    return _KIND.at(
        process,
        begin_ns,
        last.end_ns,
        {"sm_clock_mhz": clock, "others_clock_mhz": others, "slower_share": share},
        known_ns=last.known_ns,
        gpu=(process.gpu_key or ("", -1))[1],
        names=" and ".join(names) or None,
    )
