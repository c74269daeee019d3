"""The rank that delays the others since a change of pace that has no other recorded cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support.causes.causes import build_late_cause
from zerotop.analysis.findings.support.causes.pace_shift import PaceShift
from zerotop.analysis.findings.support.causes.step_change import compute_own_seconds
from zerotop.analysis.findings.support.evidence import Process
from zerotop.analysis.findings.support.lines.line_findings import is_wait
from zerotop.analysis.findings.support.lines.stack_lines import BETWEEN, DATA, StackLine, find_line
from zerotop.analysis.findings.support.steps.late_spells import find_late
from zerotop.analysis.stats.medians import compute_known_median

# A cause with less confidence may be a coincidence, and gives way to a rank that is late.
_CHANCE = 0.7
# The part of a change that the late rank's own work explains, and by which the GPUs of the others are busy longer.
_MOST = 0.5
# For so long (ns) after a change, its late rank is looked for as samples come.
_SEARCHED_NS = 60 * 10**9
_COLLECTIVES = "torch.distributed."


class _Rank(NamedTuple):
    """What became longer on a rank, in seconds of an iteration."""

    own_s: float  # outside the phases in which ranks wait for each other
    data_s: float
    used_s: float  # of its GPU, kernels of collectives included; NaN if unknown
    process: Process


def blame_rank(shift: PaceShift, known_ns: int) -> PaceShift:
    """Return a slowdown without a certain cause with the late rank as its cause, if one is known.

    Its own work takes longer, while its GPU has no more to do. The others' own work does not; or they wait for their GPUs,
    which collectives keep busy, and samples show the line that takes the late rank's time.
    """
    change, cause = shift.change, shift.cause
    is_open = cause is None or (cause.confidence < _CHANCE and not cause.where)
    is_recent = known_ns <= int(change.after["begin_unix_ns"][0]) + _SEARCHED_NS
    if not is_open or not is_recent or not shift.is_worse or change.found_in or change.group.has_stages:
        return shift
    change = replace(change, known_ns=known_ns)
    ranks = sorted(
        _measure_ranks(replace(shift, change=change)), key=lambda rank: rank.own_s - max(0.0, rank.used_s)
    )  # 0 for NaN
    if len(ranks) < max(2, len(change.group.processes)):
        return shift
    *others, late = ranks
    late_s = min(late.own_s, shift.added_s)
    if late_s < _MOST * shift.added_s or not find_late(np.array(late_s), np.array(shift.after_s)):
        return shift
    where = DATA if late.data_s >= late_s / 2 else BETWEEN
    named = replace(shift, change=change, cause=build_late_cause(late.process, late_s, where))
    if late.process.is_on_gpu and not named.is_idle(late.process):
        return shift
    line = find_line(named.find_delay()._replace(end_ns=known_ns))
    is_own = late.own_s - max(rank.own_s for rank in others) >= _MOST * shift.added_s
    is_awaited = all(rank.used_s >= _MOST * shift.added_s for rank in others) and line is not None and not is_wait(line)
    return named if (is_own or is_awaited) and not _awaits_ranks(line) else shift


def _measure_ranks(shift: PaceShift) -> Iterator[_Rank]:
    """Yield the ranks that have steps with phases before and after."""
    change = shift.change
    for process in change.group.processes:
        before, after = change.phased if process is change.process else change.read_phased(process)
        if not len(before) or not len(after):
            continue
        own_s, data_s = (
            compute_known_median(late) - compute_known_median(early)
            for early, late in (
                (compute_own_seconds(before), compute_own_seconds(after)),
                (before["data_s"], after["data_s"]),
            )
        )
        early, late = change.measure_gpu_uses(process)
        yield _Rank(own_s, data_s, late * shift.after_s - early * shift.before_s, process)


def _awaits_ranks(line: StackLine | None) -> bool:
    return line is not None and any(name.startswith(_COLLECTIVES) for name in line.callees)
