"""More threads of the ranks want to run than there are cores, so that they take turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Facts, Group, Ints, Process
from zerotop.analysis.annotations.support.thresholds import CROWDED, CROWDED_OWN, CROWDED_SECONDS
from zerotop.analysis.formatting import plural, seconds
from zerotop.session.reader import Source
from zerotop_probe.recording.tables import PHASES

# Ticks further apart than this (ns) are not joined: the sampler was away.
_LONGEST_TICK_NS = 1_000_000_000
# Phases begin more often than this.
_LOOK_BACK_NS = 60_000_000_000
_FOREVER = np.iinfo(np.int64).max


@dataclass
class _Seen:
    """How far a node's samples were read, and its crowded ticks so far: (time, threads that wanted to run, cores used)."""

    counts: dict[Source, int] = field(default_factory=dict)
    last_ns: int = 0
    crowded_ns: int = 0
    ticks: list[tuple[int, float, float]] = field(default_factory=list)
    told: bool = False


def detect(facts: Facts) -> Iterator[Annotation | None]:
    """At most one finding for each attempt and node, once training has begun."""
    for group in facts.groups:
        if not len(group.lead.steps):
            continue
        for host in group.hosts:
            yield PAUSE
            seen, cores = group.kept(_Seen, host), facts.cores(host)
            if cores is not None and not seen.told:
                mine = [process for process in group.processes if process.source.host == host]
                yield from _of_host(group, mine, cores, seen)


def _of_host(group: Group, mine: list[Process], cores: int, seen: _Seen) -> Iterator[Annotation]:
    """Reads on through the ticks until those in which ranks of a node were crowded are long enough together."""
    begin_ns = int(group.lead.steps["begin_unix_ns"][0])
    if not seen.counts:
        seen.last_ns = begin_ns
    samples = group.lead.facts.table("processes", mine[0].source.host).after(seen.counts).within(begin_ns, _FOREVER)
    if not len(samples):
        return
    samples = samples.where(np.isin(samples.rows["pid"], [process.source.pid for process in mine]))
    times, where = np.unique(samples.times, return_inverse=True)
    wanted = np.bincount(where, np.nan_to_num(samples.rows["cores_used"] + samples.rows["waiting_cores"]))
    used = np.bincount(where, np.nan_to_num(samples.rows["cores_used"]))
    lengths = np.minimum(np.diff(times, prepend=seen.last_ns), _LONGEST_TICK_NS)
    for at in np.flatnonzero((wanted >= CROWDED * cores) & (used >= CROWDED_OWN * cores)).tolist():
        seen.crowded_ns += int(lengths[at])
        seen.ticks.append((int(times[at]), float(wanted[at]), float(used[at])))
        if seen.crowded_ns >= CROWDED_SECONDS * 1e9:
            seen.told = True
            yield _found(group, mine, cores, seen, begin_ns)
            return
    seen.last_ns = int(times[-1]) if len(times) else seen.last_ns


def _found(group: Group, mine: list[Process], cores: int, seen: _Seen, begin_ns: int) -> Annotation:
    times, wanted, used = (list(column) for column in zip(*seen.ticks, strict=True))
    evidence = {
        "threads": float(np.median(wanted)),
        "cores": float(cores),
        "cores_used": float(np.median(used)),
        "processes": float(len(mine)),
        "crowded_s": seen.crowded_ns / 1e9,
        "over_s": (times[-1] - begin_ns) / 1e9,
    }
    # When training began is known only when its first step has ended.
    known_ns = max(times[-1], int(group.lead.steps["end_unix_ns"][0]))
    return _annotation(group, mine, np.array(times), known_ns, evidence)


def _annotation(group: Group, mine: list[Process], ticks: Ints, known_ns: int, seen: dict[str, float]) -> Annotation:
    lead = mine[0]
    begin_ns = int(ticks[0])
    phase = _phase(lead, ticks)
    each = seen["threads"] / seen["processes"]
    omp = lead.environment.get("OMP_NUM_THREADS")
    share = max(1, int(seen["cores"] // seen["processes"]))
    return Annotation(
        name="crowded_cores",
        begin_ns=begin_ns,
        end_ns=known_ns,
        known_ns=known_ns,
        step=group.lead.step_at(begin_ns),
        ranks=tuple(process.rank for process in mine),
        severity=Severity.WARNING,
        confidence=0.9,
        sentence=(
            f"{plural(int(seen['processes']), 'process')} x {each:.0f} threads wanted to run on {seen['cores']:.0f} cores"
            f"{f', mostly in {phase}' if phase else ''}, for {seconds(seen['crowded_s'])} of the first"
            f" {seconds(seen['over_s'])} of training: they took turns"
            f"{f', with OMP_NUM_THREADS={omp}' if omp else ', OMP_NUM_THREADS not being set'}."
        ),
        advice=f"Start with OMP_NUM_THREADS={share}, or deepspeed --bind_cores_to_rank, which also sets it.",
        evidence=seen,
    )


def _phase(lead: Process, ticks: Ints) -> str:
    """The phase that a rank had begun last at most of these moments; empty where it has not said."""
    begun = lead.begun.within(int(ticks[0]) - _LOOK_BACK_NS, int(ticks[-1]))
    last = np.searchsorted(begun.times, ticks, "right") - 1
    last = last[last >= 0]
    if not len(last):
        return ""
    phases, counts = np.unique(begun.rows["phase"][last], return_counts=True)
    most = int(phases[int(np.argmax(counts))])
    return PHASES[most] if most < len(PHASES) else ""
