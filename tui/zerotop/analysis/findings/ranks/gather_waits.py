"""GPUs wait for gathered parameters: those of the others for one slow rank, or all of them for the transfers.

Under ZeRO-3 and FSDP a slow rank makes the iterations of all ranks equally longer. Two GPU times identify it. Compute
streams wait for gathers, and the slowest rank waits only for the transfers. The time of a forward without these waits is the
rank's own computation. Both are lower bounds of the others' wait, because gathers may run far ahead.

The wait of all ranks, because computation does not hide the transfers or no longer does, is the shortest wait of any compute
stream.

The waits of all ranks' compute streams for gathered parameters, in the same few steps under ZeRO-3 or FSDP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, in_each_attempt
from zerotop.analysis.findings.support.causes.step_change import compute_own_seconds
from zerotop.analysis.findings.support.lines.stack_lines import find_deadline
from zerotop.analysis.findings.support.links import Kinds, is_simultaneous
from zerotop.analysis.findings.support.steps.contests import are_equal, find_slow_rounds
from zerotop.analysis.findings.support.steps.growing_batches import get_batch_sizes
from zerotop.analysis.findings.support.thresholds import BETWEEN_SECONDS
from zerotop.analysis.stats.medians import compute_known_median
from zerotop.recording.samples import Floats, Rows
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import PHASE_CODE

# The events of all ranks for the same steps are written within this time (ns).
_TOGETHER_NS = 10_000_000_000


class GatherLook(NamedTuple):
    """The measurement of one rank in a few steps, in seconds."""

    rows: Rows  # of the steps (STEP_DTYPE)
    waited: Floats  # total wait of the compute stream in each step
    starved: float  # share of the waits at which the compute stream was idle


class Looks(NamedTuple):
    """The measurements of all ranks in the same steps, in the order of the processes."""

    each: list[GatherLook]
    known_ns: int  # unix time at which all of them were written

    @property
    def iteration_s(self) -> float:
        """The mean duration of these steps."""
        return float(np.mean([look.rows["iteration_s"].mean() for look in self.each]))


def read_looks(group: Group, number: int) -> tuple[int, Looks | None]:
    """Return the looks that begin with the lead's look of a number, or with a later one, and the number of the next.

    Only looks for steps that all ranks have measured count: ranks with different step times share only some. None before
    there are any.
    """
    for event in group.lead.events_of(events.StreamWaits)[number:]:
        each = [_find_event(process, event.first_step) for process in group.processes]
        found = [one for one in each if one is not None]
        if len(found) < len(each):
            deadlines = [find_deadline(process, event.unix_ns, _TOGETHER_NS) for process in group.processes]
            if max(deadlines) > group.lead.at.cursor_ns:
                break
        number += 1
        if len(found) == len(each):
            looks = [_read_look(process, one) for process, one in zip(group.processes, found, strict=True)]
            if len({len(look.waited) for look in looks}) == 1 and all(len(look.rows) == len(look.waited) for look in looks):
                return number, Looks(looks, max(one.unix_ns for one in found))
    return number, None


def _find_event(process: Process, step: int) -> events.StreamWaits | None:
    """Return the complete event of a process that begins with a step, or None."""
    for event in reversed(process.events_of(events.StreamWaits)):
        if event.first_step == step:
            is_complete = len(event.waited_ns) == len(event.waits) == len(event.starved) > 0
            return event if is_complete else None
    return None


def _read_look(process: Process, event: events.StreamWaits) -> GatherLook:
    first, waited = event.first_step, np.array(event.waited_ns) / 1e9
    begin, end = np.searchsorted(process.steps["step"], [first, first + len(waited)])
    starved = sum(event.starved) / max(1, sum(event.waits))
    return GatherLook(process.steps[int(begin) : int(end)], waited, starved)


_GPU = FindingKind(
    name="slow_gpu",
    confidence=0.85,
    headline="The others wait for the GPU of rank {rank}, {wait_s:seconds} or more of each iteration",
    details=(
        "It computes longer, measured with CUDA events, and the other GPUs wait when they gather parameters. An iteration"
        " takes {iteration_s:seconds}."
    ),
    advice="See whether this GPU has more to do, runs at lower clocks, or has another process on it.",
    fix="nvidia-smi -q -d CLOCK,PERFORMANCE,PIDS[ -i {gpu}]",
    explained_by=(Kinds(is_simultaneous, "nvlink_faults", "pcie_link", "slow_clock", "throttled"),),
)
_RANK = _GPU.with_changes(
    headline="The others wait for rank {rank}, {wait_s:seconds} or more of each iteration",
    details=(
        "Its GPU is often idle because the CPU launches work too late: its Python code is slower. The other GPUs wait when"
        " they gather parameters. An iteration takes {iteration_s:seconds}."
    ),
    advice="See what only this rank does in forward and backward; if nothing, compare its cores with the others'.",
    fix="py-spy dump --pid {pid}",
)
_LINKS = FindingKind(
    name="slow_links",
    confidence=0.8,
    headline="All GPUs wait {wait_s:seconds} of each iteration ({share:percent}) for gathered parameters",
    details="The transfers take longer than the computation that overlaps them. An iteration takes {iteration_s:seconds}.",
    advice="See which links NCCL uses, NVLink or only PCIe and sockets; a larger micro-batch hides more.",
    fix="NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH",
)
_SLOWER_LINKS = _LINKS.with_changes(
    headline="All GPUs wait {wait_s:seconds} of each iteration for gathered parameters, {before_s:seconds} before",
    details="The links between the GPUs became slower, or others use them, too. An iteration takes {iteration_s:seconds}.",
    advice="See what else uses the links: other jobs on the node, copies between GPUs and host, the network.",
    fix="nvidia-smi topo -m",
)
# Waits are reported from this share of an iteration on. They have grown if they are longer than the first ones by this
# factor, and by this share of an iteration.
_LINKS_SHARE, _TIMES, _MORE_SHARE = 0.15, 1.5, 0.05
# The smallest wait for one rank that is reported, as a share of an iteration. Between two equal H200s it was 0.3 %.
_LEAST_SHARE = 0.03
# A GPU that is idle at more than this share of its waits is limited by its CPU. For busy GPUs it was 4 to 7 %.
_STARVED = 0.12
# If GPUs are limited by their CPUs, that of the slow rank must be idle at a share of waits that is larger by this.
_MORE_STARVED = 0.08
# The same rank must be slow, or all must wait, in this many looks in a row.
_LOOKS = 2
# Forwards up to this long (ns) before a look count, too: few steps have a device time.
_BEFORE_NS = 20_000_000_000
# The largest difference between the batch sizes of ranks with equal work, as a share.
_SAME_SIZE = 0.05


class _Wait(NamedTuple):
    """The rank that the others waited for in one look, and the wait in seconds per iteration."""

    rank: int  # index of the process; -1 if there is none
    wait_s: float = 0.0
    iteration_s: float = 0.0
    starved: float = 0.0
    begin_ns: int = 0
    end_ns: int = 0


_NOBODY = _Wait(-1)


class _Round(NamedTuple):
    """One look, and what it shows."""

    following: int  # number of the lead's next look
    looks: Looks
    for_one: _Wait
    for_all_s: float  # the wait of all ranks


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report for each attempt what _LOOKS looks in a row show.

    The first rank that the others waited for, once; long waits of all ranks once, and once that they have grown.
    """
    group = window.subject
    if len(group.processes) < 2 or not group.gathers_parameters:
        return
    rounds = window.extend(partial(_judge_look, group))
    found = find_slow_rounds([one.for_one.rank for one in rounds], _LOOKS)
    if found is not None and not group.has_stages:
        yield _build_rank_finding(group, rounds[found])
    yield from _find_long_waits(group, rounds)


def _judge_look(group: Group, before: _Round | None) -> _Round | None:
    following, looks = read_looks(group, before.following if before is not None else 0)
    if looks is None:
        return None
    return _Round(following, looks, _measure_wait_for_one(group, looks), _measure_wait_for_all(looks))


def _measure_wait_for_one(group: Group, looks: Looks) -> _Wait:
    each, iteration = looks.each, looks.iteration_s
    if not _have_same_batches(each):
        return _NOBODY
    forwards = np.array([_measure_forward(*both) for both in zip(group.processes, [one.rows for one in each], strict=True)])
    slow, wait = max(_compare_forwards(each, forwards), _compare_waits(each), key=lambda one: one[1])
    starved = each[slow].starved
    most_starved = max(look.starved for index, look in enumerate(each) if index != slow)
    is_by_chance = starved > _STARVED and starved < most_starved + _MORE_STARVED
    # Work between the phases is another finding's.
    own = [compute_known_median(compute_own_seconds(look.rows)) for look in each]
    own_longer = own[slow] - float(np.median(np.delete(own, slow)))
    if not wait >= max(BETWEEN_SECONDS, _LEAST_SHARE * iteration) or is_by_chance or own_longer >= wait / 2:
        return _NOBODY
    rows = each[slow].rows
    return _Wait(slow, wait, iteration, starved, int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1]))


def _measure_forward(process: Process, rows: Rows) -> float:
    """Return the GPU time of the forwards of a step, in seconds: the median of the last steps that have one."""
    samples = process.records("device_times").read_window(
        int(rows["begin_unix_ns"][0]) - _BEFORE_NS, int(rows["end_unix_ns"][-1])
    )
    if not len(samples):
        return float("nan")
    found = samples.rows
    found = found[(found["phase"] == PHASE_CODE["forward"]) & (found["depth"] == 0) & (found["engine"] == 0)]
    _, indices = np.unique(found["step"], return_inverse=True)
    seconds = np.bincount(indices, found["device_ns"] / 1e9).astype(np.float64)
    return compute_known_median(seconds) if len(found) else float("nan")


def _have_same_batches(looks: Sequence[GatherLook]) -> bool:
    sizes = np.array([float(np.nansum(get_batch_sizes(look.rows))) for look in looks])
    return bool(are_equal(sizes, _SAME_SIZE))


def _compare_forwards(looks: Sequence[GatherLook], forwards: Floats) -> tuple[int, float]:
    """Return the index of the rank with the longest forward without waits, and a lower bound of the difference (s)."""
    own = forwards - np.array([float(look.waited.mean()) for look in looks])
    slow = int(np.argmax(own))
    longer = float(own[slow] - np.delete(forwards, slow).max())
    return slow, longer if np.isfinite(longer) else 0.0


def _compare_waits(looks: Sequence[GatherLook]) -> tuple[int, float]:
    """Return the index of the rank that waits least, and how much longer (s) each other rank waits."""
    waited = np.array([look.waited for look in looks])
    slow = int(np.argmin(waited.sum(axis=1)))
    longer = np.delete(waited, slow, axis=0).min(axis=0) - waited[slow]
    return slow, float(min(longer.mean(), 2 * np.median(longer)))


def _build_rank_finding(group: Group, rounds: Sequence[_Round]) -> Finding:
    waits = [one.for_one for one in rounds]
    process = group.processes[waits[0].rank]
    wait, iteration, starved = (float(np.mean([one[part] for one in waits])) for part in (1, 2, 3))
    return (_GPU if starved <= _STARVED else _RANK).at(
        process,
        waits[0].begin_ns,
        waits[-1].end_ns,
        {"wait_s": wait, "iteration_s": iteration, "starved_share": starved},
        known_ns=rounds[-1].looks.known_ns,
        cost=wait / iteration,
        pid=process.source.pid,
        gpu=process.gpu_key[1] if process.gpu_key is not None else None,
    )


def _find_long_waits(group: Group, rounds: Sequence[_Round]) -> Iterator[Finding]:
    """Find the first looks in a row that all waited long in, and the first in which they waited longer than at first."""
    long: list[_Round] = []
    longer: list[_Round] = []
    is_told = False
    for number, one in enumerate(rounds, 1):
        before = max(other.for_all_s for other in rounds[: min(number, _LOOKS)])
        longer = [*longer, one] if _has_grown(one.for_all_s, before, one.looks.iteration_s) else []
        long = [*long[1 - _LOOKS :], one] if one.for_all_s >= _LINKS_SHARE * one.looks.iteration_s else []
        if len(longer) == _LOOKS:
            yield _build_links_finding(group, longer, before)
            return
        # If the last wait has grown, the next look decides which finding it is.
        if len(long) == _LOOKS and not longer and not is_told:
            is_told = True
            yield _build_links_finding(group, long, None)


def _measure_wait_for_all(looks: Looks) -> float:
    """Return the median over the steps of the shortest wait of any rank, in seconds."""
    return float(np.median(np.min([look.waited for look in looks.each], axis=0)))


def _has_grown(wait_s: float, before_s: float, iteration_s: float) -> bool:
    return wait_s >= _TIMES * before_s and wait_s - before_s >= _MORE_SHARE * iteration_s


def _build_links_finding(group: Group, rounds: Sequence[_Round], before_s: float | None) -> Finding:
    """``before_s``: the wait at first if it has grown, else None."""
    wait, looks = float(np.mean([one.for_all_s for one in rounds])), [one.looks for one in rounds]
    iteration = float(np.mean([one.iteration_s for one in looks]))
    return (_LINKS if before_s is None else _SLOWER_LINKS).at(
        group,
        int(looks[0].each[0].rows["begin_unix_ns"][0]),
        int(looks[-1].each[0].rows["end_unix_ns"][-1]),
        {"wait_s": wait, "iteration_s": iteration, "before_s": before_s},
        known_ns=looks[-1].known_ns,
        cost=(wait - (before_s or 0.0)) / iteration,
        share=wait / iteration,
    )
