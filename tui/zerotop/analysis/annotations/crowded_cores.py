"""More threads of the ranks want to run than there are cores, so that they take turns."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.annotation import Annotation, Severity
from zerotop.analysis.annotations.facts import Facts, Group, Ints, Process
from zerotop.analysis.annotations.thresholds import CROWDED, CROWDED_SECONDS
from zerotop.analysis.annotations.words import plural, seconds
from zerotop_probe.recording.tables import PHASES

# Ticks further apart than this (ns) are not joined: the sampler was away.
_LONGEST_TICK_NS = 1_000_000_000


def detect(facts: Facts) -> Iterator[Annotation]:
    """At most one finding for each attempt and node, once training has begun."""
    for group in facts.groups:
        for host in sorted({process.source.host for process in group.processes}):
            cores = facts.cores(host)
            mine = [process for process in group.processes if process.source.host == host]
            if cores is not None and len(group.lead.steps):
                found = _of_host(group, mine, cores)
                if found is not None:
                    yield found


def _of_host(group: Group, mine: list[Process], cores: int) -> Annotation | None:
    """The ticks in which ranks of a node were crowded, until they are long enough together."""
    samples = group.lead.facts.table("processes", mine[0].source.host)
    begin_ns = int(group.lead.steps["begin_unix_ns"][0])
    samples = samples.within(begin_ns, np.iinfo(np.int64).max)
    if not len(samples):
        return None
    samples = samples.where(np.isin(samples.rows["pid"], [process.source.pid for process in mine]))
    times, where = np.unique(samples.times, return_inverse=True)
    wanted = np.bincount(where, np.nan_to_num(samples.rows["cores_used"] + samples.rows["waiting_cores"]))
    used = np.bincount(where, np.nan_to_num(samples.rows["cores_used"]))
    lengths = np.minimum(np.diff(times, prepend=times[:1]), _LONGEST_TICK_NS)
    crowded = wanted >= CROWDED * cores
    until = np.flatnonzero(np.cumsum(lengths * crowded) >= CROWDED_SECONDS * 1e9)
    if not len(until):
        return None
    ticks = np.flatnonzero(crowded[: until[0] + 1])
    evidence = {
        "threads": float(np.median(wanted[ticks])),
        "cores": float(cores),
        "cores_used": float(np.median(used[ticks])),
        "processes": float(len(mine)),
        "crowded_s": float((lengths * crowded)[: until[0] + 1].sum() / 1e9),
        "over_s": float((times[until[0]] - begin_ns) / 1e9),
    }
    # When training began is known only when its first step has ended.
    known_ns = max(int(times[until[0]]), int(group.lead.steps["end_unix_ns"][0]))
    return _annotation(group, mine, times[ticks], known_ns, evidence)


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
    sources = lead.facts.session.sources["begins"]
    mine = [source for source in sources if (source.host, source.pid) == (lead.source.host, lead.source.pid)]
    begun = lead.facts.samples(mine)
    last = np.searchsorted(begun.times, ticks, "right") - 1
    if not len(last) or last.min() < 0:
        return ""
    phases, counts = np.unique(begun.rows["phase"][last], return_counts=True)
    most = int(phases[int(np.argmax(counts))])
    return PHASES[most] if most < len(PHASES) else ""
