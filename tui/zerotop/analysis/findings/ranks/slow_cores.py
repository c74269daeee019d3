"""A rank on a CPU holds up the others within forward and backward, where they wait for it to share parameters.

Under ZeRO-3 and FSDP ranks gather parameters in each of these phases, so the phases of all ranks become longer alike. Only
the training threads differ: that of the slow rank computes or waits for a core, while the others wait in a gloo collective,
which needs no processor. A rank that sleeps or waits for a disk there is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, host_load, in_each_attempt
from zerotop.analysis.findings.support.causes.step_change import compute_own_seconds
from zerotop.analysis.findings.support.lines.stack_lines import find_deadline
from zerotop.analysis.findings.support.steps.contests import are_equal, find_slow_rounds
from zerotop.analysis.findings.support.steps.growing_batches import UNKNOWN_SIZES, get_batch_sizes, name_size
from zerotop.analysis.findings.support.thresholds import BETWEEN_SECONDS, STALL_SECONDS
from zerotop.analysis.stats.medians import compute_known_median
from zerotop.recording.samples import Floats, Rows

_COMPUTES = FindingKind(
    name="slow_cores",
    confidence=0.85,
    headline="Rank {rank} computes for {slow_s:seconds} in each iteration, the others for {others_s:seconds}",
    details=(
        "This is the processor time of the training threads[, for batches with as many {same}]. The others wait for it in"
        " forward and backward, where ranks gather parameters: an iteration takes {iteration_s:seconds}."
    ),
    advice="See what only this rank computes in forward and backward; if nothing, its cores are slower.",
    fix="py-spy dump --pid {pid}",
)
_WAITS = _COMPUTES.with_changes(
    headline="In each iteration rank {rank} waits {slow_s:seconds} for a core, the others {others_s:seconds}",
    details=(
        "Meanwhile other cores of the node are free. The other ranks wait for it in forward and backward, where they gather"
        " parameters: an iteration takes {iteration_s:seconds}."
    ),
    advice="See what else runs on its cores, and bind each rank to cores of its own.",
    fix="taskset -pc {pid}",
)
# The share of an iteration by which it computes longer, or waits longer for a core. Clean ranks differ more in the latter.
_SLOW_SHARE, _WAITING_SHARE = 0.08, 0.25
# Each round has at least these steps and nanoseconds, and this many in a row must show the same rank. Later ones last at
# least a share of the training before them, so that a long recording has few more.
_STEPS, _ROUND_NS, _ROUNDS, _LONGER = 10, 2_000_000_000, 2, 0.01
# The first steps load and allocate.
_FIRST_STEPS = 5
# Ranks that wait for each other have iterations of the same length, and batches of the same size, up to this share.
_SAME = 0.05


class _Slow(NamedTuple):
    """The rank that was slow in a round, as an index (-1: none), and by how many seconds an iteration."""

    rank: int
    waits: bool = False
    slow_s: float = 0.0
    others_s: float = 0.0
    iteration_s: float = 0.0


class _Round(NamedTuple):
    """Enough steps to tell whether a rank is slow."""

    steps: slice
    known_ns: int
    slow: _Slow


@in_each_attempt()
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report once for each attempt: the first rank that was slow in _ROUNDS rounds in a row."""
    group = window.subject
    if len(group.processes) < 2 or group.has_stages or not host_load.hides_slow_cores(group):
        return
    rounds = window.extend(partial(_judge_round, group), _ROUNDS - 1)
    # A rank that computes longer and one that waits longer are not the same.
    found = find_slow_rounds([2 * one.slow.rank + one.slow.waits for one in rounds], _ROUNDS)
    if found is not None:
        yield _build_finding(group, rounds[found][0].steps, rounds[found][-1])


def _judge_round(group: Group, before: _Round | None) -> _Round | None:
    """Return the round after another one; None before it is known."""
    rows = [process.aligned_steps for process in group.processes]
    steps = _find_steps(rows, before.steps.stop if before is not None else _FIRST_STEPS, min(len(one) for one in rows))
    if steps is None:
        return None
    end_ns = max(int(one["end_unix_ns"][steps][-1]) for one in rows)
    known_ns = max(find_deadline(process, end_ns, host_load.SAMPLED_NS) for process in group.processes)
    return (
        _Round(steps, known_ns, _find_slow(group, [one[steps] for one in rows]))
        if known_ns <= group.lead.at.cursor_ns
        else None
    )


def _find_steps(rows: list[Rows], first: int, count: int) -> slice | None:
    """Return the steps of the next round: enough that all ranks have finished."""
    last = first + _STEPS - 1
    if last >= count:
        return None
    begin_ns = min(int(one["begin_unix_ns"][first]) for one in rows)
    trained_ns = begin_ns - min(int(one["begin_unix_ns"][0]) for one in rows)
    ends: Floats = np.max([one["end_unix_ns"][last:count] for one in rows], axis=0)
    enough = np.flatnonzero(ends >= begin_ns + max(_ROUND_NS, _LONGER * trained_ns))
    return slice(first, last + int(enough[0]) + 1) if len(enough) else None


def _find_slow(group: Group, rows: list[Rows]) -> _Slow:
    nobody, begin_ns = _Slow(-1), min(int(one["begin_unix_ns"][0]) for one in rows)
    end_ns, count = max(int(one["end_unix_ns"][-1]) for one in rows), len(rows[0])
    iteration = (end_ns - begin_ns) / 1e9 / count
    if not _have_same(rows):
        return nobody
    uses = [host_load.measure_thread_use(process, begin_ns, end_ns) for process in group.processes]
    known = [use for use in uses if use is not None]
    # Work between the phases is another finding's.
    own = [compute_known_median(compute_own_seconds(one)) for one in rows]
    if len(known) < len(uses) or np.isnan(own).any():
        return nobody
    computed, waited = (np.array([use[part] for use in known]) / count for part in (0, 1))
    longer, index = max(own) - min(own), int(np.argmax(computed))
    others, slow = np.sort(computed)[-2:].tolist()
    # If others use the cores, the rank also waits for one, and an iteration takes longer than the work of the ranks in it.
    least = max(BETWEEN_SECONDS, _SLOW_SHARE * (iteration - waited[index]))
    if slow >= host_load.SLOW_TIMES * others and slow - others - longer >= least:
        return _Slow(index, False, slow, others, iteration)
    others, slow = np.sort(waited)[-2:].tolist()
    if slow - others - longer < max(STALL_SECONDS, _WAITING_SHARE * iteration) or _lacks_cores(group, begin_ns, end_ns):
        return nobody
    return _Slow(int(np.argmax(waited)), True, slow, others, iteration)


def _have_same(rows: list[Rows]) -> bool:
    """Whether ranks had the same amount of work in the same time."""
    sizes = np.array([float(get_batch_sizes(one[~one["counted"]]).sum()) for one in rows])
    counts = np.array([max(1, np.count_nonzero(~one["counted"])) for one in rows])
    lengths = np.array([float(np.nanmedian(one["iteration_s"])) for one in rows])
    return bool(are_equal(sizes / counts, _SAME) and are_equal(lengths, _SAME))


def _lacks_cores(group: Group, begin_ns: int, end_ns: int) -> bool:
    """Whether other processes use the cores of a node, which takes them from its ranks at random."""
    loads = [host_load.measure_load(group.lead.recording, host, begin_ns, end_ns) for host in group.hosts]
    return any(load is None or load.is_starved or load.is_disturbed for load in loads)


def _build_finding(group: Group, first: slice, last: _Round) -> Finding:
    slow = last.slow
    process = group.processes[slow.rank]
    kind, rows = _WAITS if slow.waits else _COMPUTES, [one.aligned_steps[last.steps] for one in group.processes]
    same = name_size(np.concatenate([one[~one["counted"]] for one in rows]))
    if same is None and not slow.waits:
        kind = kind.with_changes(advice=f"{UNKNOWN_SIZES} {kind.advice}")
    return kind.at_steps(
        process,
        process.aligned_steps[_find_onset(group, first, slow) : last.steps.stop],
        {"slow_s": slow.slow_s, "others_s": slow.others_s, "iteration_s": slow.iteration_s},
        known_ns=last.known_ns,
        cost=(slow.slow_s - slow.others_s) / slow.iteration_s,
        pid=process.source.pid,
        same=same,
    )


def _find_onset(group: Group, steps: slice, slow: _Slow) -> int:
    """Return the index of the first slow step: in the first round that shows it, or in the one before."""
    begin = max(0, steps.start - _STEPS)
    most = slow.slow_s - slow.others_s
    late = np.clip([_measure_lateness(group, index, slow) for index in range(begin, steps.stop)], 0.0, most)
    # Limited, so that a single step counts against both levels alike.
    misfits = np.concatenate([[0.0], np.cumsum(late)]) + np.concatenate([np.cumsum((most - late)[::-1])[::-1], [0.0]])
    return int(begin + np.argmin(misfits[:-1]))


def _measure_lateness(group: Group, index: int, slow: _Slow) -> float:
    """Return the seconds per step by which the rank computed, or waited for a core, longer than any other rank."""
    rows = [process.aligned_steps[index] for process in group.processes]
    uses = [
        host_load.measure_thread_use(process, int(row["begin_unix_ns"]), int(row["end_unix_ns"]))
        for process, row in zip(group.processes, rows, strict=True)
    ]
    each = [0.0 if use is None else use.waited if slow.waits else use.computed for use in uses]
    others = each[: slow.rank] + each[slow.rank + 1 :]
    return each[slow.rank] - max(others)
