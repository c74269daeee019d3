"""More threads of the ranks want to run than there are cores, so that they take turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Ints, Process
from zerotop.analysis.annotations.support.thresholds import CROWDED_LOAD, CROWDED_RANKS_SHARE, CROWDED_SECONDS
from zerotop.analysis.formatting import format_count, format_seconds
from zerotop.session.reader import Source
from zerotop_probe.recording.tables import PHASES

# Ticks further apart than this (ns) are not joined: the sampler was away.
_LONGEST_TICK_NS = 1_000_000_000
# Phases begin more often than this.
_LOOK_BACK_NS = 60_000_000_000
_FOREVER = np.iinfo(np.int64).max


@dataclass
class _State:
    """How far a node's samples were read, and its crowded ticks so far: (time, threads that wanted to run, cores used)."""

    counts: dict[Source, int] = field(default_factory=dict)
    last_ns: int = 0
    crowded_ns: int = 0
    ticks: list[tuple[int, float, float]] = field(default_factory=list)
    is_reported: bool = False


def detect(facts: Evidence) -> Iterator[Annotation | None]:
    """At most one finding for each attempt and node, once training has begun."""
    for group in facts.groups:
        if not len(group.lead.steps):
            continue
        for host in group.hosts:
            yield PAUSE
            seen, cores = group.get_state(_State, host), facts.count_cores(host)
            if cores is not None and not seen.is_reported:
                mine = [process for process in group.processes if process.source.host == host]
                yield from _check_host(group, mine, cores, seen)


def _check_host(group: Group, processes: list[Process], cores: int, state: _State) -> Iterator[Annotation]:
    """Reads on through the ticks until those in which ranks of a node were crowded are long enough together."""
    begin_ns = int(group.lead.steps["begin_unix_ns"][0])
    if not state.counts:
        state.last_ns = begin_ns
    samples = (
        group.lead.facts.get_records("processes", processes[0].source.host)
        .read_new(state.counts)
        .clip_window(begin_ns, _FOREVER)
    )
    if not len(samples):
        return
    samples = samples.select_rows(np.isin(samples.rows["pid"], [process.source.pid for process in processes]))
    times, where = np.unique(samples.times, return_inverse=True)
    wanted = np.bincount(where, np.nan_to_num(samples.rows["cores_used"] + samples.rows["waiting_cores"]))
    used = np.bincount(where, np.nan_to_num(samples.rows["cores_used"]))
    lengths = np.minimum(np.diff(times, prepend=state.last_ns), _LONGEST_TICK_NS)
    for at in np.flatnonzero((wanted >= CROWDED_LOAD * cores) & (used >= CROWDED_RANKS_SHARE * cores)).tolist():
        state.crowded_ns += int(lengths[at])
        state.ticks.append((int(times[at]), float(wanted[at]), float(used[at])))
        if state.crowded_ns >= CROWDED_SECONDS * 1e9:
            state.is_reported = True
            yield _summarize_ticks(group, processes, cores, state, begin_ns)
            return
    state.last_ns = int(times[-1]) if len(times) else state.last_ns


def _summarize_ticks(group: Group, processes: list[Process], cores: int, state: _State, begin_ns: int) -> Annotation:
    times, wanted, used = (list(column) for column in zip(*state.ticks, strict=True))
    evidence = {
        "threads": float(np.median(wanted)),
        "cores": float(cores),
        "cores_used": float(np.median(used)),
        "processes": float(len(processes)),
        "crowded_s": state.crowded_ns / 1e9,
        "over_s": (times[-1] - begin_ns) / 1e9,
    }
    # When training began is known only when its first step has ended.
    known_ns = max(times[-1], int(group.lead.steps["end_unix_ns"][0]))
    return _build_finding(group, processes, np.array(times), known_ns, evidence)


def _build_finding(
    group: Group, processes: list[Process], ticks: Ints, known_ns: int, evidence: dict[str, float]
) -> Annotation:
    lead = processes[0]
    begin_ns = int(ticks[0])
    phase = _find_phase(lead, ticks)
    each = evidence["threads"] / evidence["processes"]
    omp = lead.environment.get("OMP_NUM_THREADS")
    share = max(1, int(evidence["cores"] // evidence["processes"]))
    return Annotation(
        name="crowded_cores",
        begin_ns=begin_ns,
        end_ns=known_ns,
        known_ns=known_ns,
        step=group.lead.step_at(begin_ns),
        ranks=tuple(process.rank for process in processes),
        severity=Severity.WARNING,
        confidence=0.9,
        sentence=(
            f"{format_count(int(evidence['processes']), 'process')} x {each:.0f} threads wanted to run on {evidence['cores']:.0f} cores"
            f"{f', mostly in {phase}' if phase else ''}, for {format_seconds(evidence['crowded_s'])} of the first"
            f" {format_seconds(evidence['over_s'])} of training: they took turns"
            f"{f', with OMP_NUM_THREADS={omp}' if omp else ', OMP_NUM_THREADS not being set'}."
        ),
        advice=f"Start with OMP_NUM_THREADS={share}, or deepspeed --bind_cores_to_rank, which also sets it.",
        evidence=evidence,
    )


def _find_phase(lead: Process, ticks: Ints) -> str:
    """The phase that a rank had begun last at most of these moments; empty where it has not said."""
    begun = lead.begins.read_window(int(ticks[0]) - _LOOK_BACK_NS, int(ticks[-1]))
    last = np.searchsorted(begun.times, ticks, "right") - 1
    last = last[last >= 0]
    if not len(last):
        return ""
    phases, counts = np.unique(begun.rows["phase"][last], return_counts=True)
    most = int(phases[int(np.argmax(counts))])
    return PHASES[most] if most < len(PHASES) else ""
