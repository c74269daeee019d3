"""More threads of the ranks are runnable than there are cores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_node
from zerotop.analysis.findings.support.host_load import find_longest_wait
from zerotop.analysis.findings.support.started_threads import ADVICE, StartedThreads, find_started_threads
from zerotop.analysis.findings.support.steps.fp16_warmup import count_skipped_first
from zerotop.analysis.stats.change_points import SETTLED_STEPS
from zerotop.recording.moments.at import find_cores
from zerotop.recording.samples import Ints
from zerotop_probe.recording.tables import PHASES

_KIND = FindingKind(
    name="crowded_cores",
    lost_once="lost_s",
    severity=Severity.INFO,
    confidence=0.9,
    headline="{threads:count thread} of {processes:count process} compete for {cores:count core}[ in {phase}]",
    details=(
        "More threads were runnable than there are cores for {crowded_s:seconds} of the first {over_s:seconds} of training."
        " OMP_NUM_THREADS is {omp}.[ Meanwhile the training thread of rank {waiting_rank} waited for a core for"
        " {lost_s:seconds}.]"
    ),
    advice=(
        "Start with as many threads as each rank has cores{binding_too}; torch.set_num_threads() in the script would"
        " overrule it."
    ),
    fix="export OMP_NUM_THREADS={share}",
)
_STARTED = _KIND.with_changes(
    headline="{threads:count thread} of {processes:count process} compete for {cores:count core} since step {step}",
    details=(
        "More threads were runnable than there are cores for {crowded_s:seconds} of {over_s:seconds}. Rank {rank} has"
        " {threads_now} threads instead of {threads_before} since step {step}."
        "[ Meanwhile the training thread of rank {waiting_rank} waited for a core for {lost_s:seconds}.]"
    ),
    advice=ADVICE,
    fix="{started_fix}",
)
# Runnable threads of all ranks per core of the host, over this long in all; 1 is full use.
CROWDED_LOAD = 1.5
CROWDED_SECONDS = 1.0
# Share of the cores that the ranks use then. If other processes use them, the ranks do not have too many threads.
CROWDED_RANKS_SHARE = 0.6
# Share of that time in which a training thread waits for a core, from which on it costs something.
WAITING_SHARE = 0.02

# Ticks further apart than this (ns) are not joined: the sampler was stopped.
_LONGEST_TICK_NS = 1_000_000_000
# Phases begin more often than this.
_LOOK_BACK_NS = 60_000_000_000
_FOREVER = np.iinfo(np.int64).max
# Names of phases that are no words.
_PHASE_WORDS = {"cpu_optimizer": "the CPU optimizer"}


class _Tick(NamedTuple):
    """A sample of a node's ranks while its cores were crowded, and the time that it stands for."""

    time_ns: int
    length_ns: int
    runnable: float
    cores_used: float


@in_each_node()
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report at most once for each attempt and node, after training has begun: cores were crowded for long enough in all."""
    cores = find_cores(window.recording.at, window.host)
    if cores is None or not len(window.subject.lead.steps):
        return
    begin_ns = int(window.subject.lead.steps["begin_unix_ns"][0])
    ticks = window.results(_read_ticks(window, cores, begin_ns), None)
    crowded_ns = np.cumsum([tick.length_ns for tick in ticks])
    last = int(np.searchsorted(crowded_ns, CROWDED_SECONDS * 1e9))
    if last < len(ticks):
        yield _build_finding(window.subject, window.subject.processes_on(window.host), cores, ticks[: last + 1], begin_ns)


def _read_ticks(window: SearchWindow[Group], cores: int, begin_ns: int) -> Iterator[_Tick]:
    records = window.recording.at.records("processes", window.host)
    samples = window.records(records).clip_window(begin_ns, _FOREVER)
    if not len(samples):
        return
    first_ns = int(samples.times[0])
    earlier = records.read_window(max(begin_ns, first_ns - _LONGEST_TICK_NS), first_ns - 1).times
    last_ns = int(earlier[-1]) if len(earlier) else begin_ns
    samples = samples.select(
        np.isin(samples.rows["pid"], [one.source.pid for one in window.subject.processes_on(window.host)])
    )
    times, ticks = np.unique(samples.times, return_inverse=True)
    runnable = np.bincount(ticks, np.nan_to_num(samples.rows["cores_used"] + samples.rows["waiting_cores"]))
    used = np.bincount(ticks, np.nan_to_num(samples.rows["cores_used"]))
    lengths = np.minimum(np.diff(times, prepend=last_ns), _LONGEST_TICK_NS)
    for at in np.flatnonzero((runnable >= CROWDED_LOAD * cores) & (used >= CROWDED_RANKS_SHARE * cores)).tolist():
        yield _Tick(int(times[at]), int(lengths[at]), float(runnable[at]), float(used[at]))


def _build_finding(group: Group, processes: list[Process], cores: int, ticks: list[_Tick], begin_ns: int) -> Finding:
    times, lengths, runnable, used = (list(column) for column in zip(*ticks, strict=True))
    threads = float(np.median(runnable))
    # When training began is known only at the end of its first step.
    known_ns = max(times[-1], int(group.lead.steps["end_unix_ns"][0]))
    started, first_ns = _find_started(processes[0], begin_ns, times)
    evidence = {
        "threads": threads,
        "cores": cores,
        "cores_used": float(np.median(used)),
        "processes": len(processes),
        "crowded_s": sum(lengths) / 1e9,
        "over_s": (times[-1] - (begin_ns if started is None else first_ns)) / 1e9,
    }
    waiting_rank, share = find_longest_wait(processes, first_ns, times[-1], known_ns=known_ns)
    is_costly = share is not None and share >= WAITING_SHARE
    if share is not None and is_costly:
        evidence |= {"lost_s": share * (times[-1] - first_ns) / 1e9}
    values: dict[str, Any] = {
        "waiting_rank": waiting_rank if is_costly else None,
        "phase": _find_phase(processes[0], np.array(times)),
        "omp": processes[0].environment.get("OMP_NUM_THREADS") or "not set",
        "share": max(1, cores // len(processes)),
    }
    kind = _KIND
    if started is not None:
        kind = _STARTED
        values |= {"threads_now": started.after, "threads_before": started.before}
        values["started_fix"] = started.build_fix(processes[0], len(processes))
    if is_costly:
        kind = kind.with_changes(severity=Severity.WARNING)
    return kind.at(group, first_ns, known_ns, evidence, ranks=[process.rank for process in processes], **values)


def _find_started(lead: Process, begin_ns: int, ticks: list[int]) -> tuple[StartedThreads | None, int]:
    """Return the threads that were started after the first steps, and since when cores are crowded (unix nanoseconds)."""
    rows, settled = lead.steps_until(ticks[0]), SETTLED_STEPS + count_skipped_first(lead)
    if len(rows) > settled:
        settled_ns = int(rows["end_unix_ns"][settled])
        early, late = (lead.host_samples.read_window(*part) for part in ((begin_ns, settled_ns), (settled_ns, ticks[-1])))
        started = find_started_threads(early, late.clip_window(ticks[0] - 1, ticks[-1]))
        if started is not None:
            return started, min(ticks[0], started.find_begin(late))
    return None, ticks[0]


def _find_phase(lead: Process, ticks: Ints) -> str | None:
    """The phase in which a rank was at most of these times; None if it is unknown."""
    begun = lead.records("begins").read_window(int(ticks[0]) - _LOOK_BACK_NS, int(ticks[-1]))
    last = np.searchsorted(begun.times, ticks, "right") - 1
    last = last[last >= 0]
    if not len(last):
        return None
    phases, counts = np.unique(begun.rows["phase"][last], return_counts=True)
    most = int(phases[int(np.argmax(counts))])
    return _PHASE_WORDS.get(PHASES[most], PHASES[most]) if most < len(PHASES) else None
