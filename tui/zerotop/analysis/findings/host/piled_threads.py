"""Python threads of one function that the job starts one after another, and does not end: they compute beside each other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Process, SearchWindow, Severity, in_each_rank
from zerotop.analysis.findings.support.started_threads import FEWEST_ALIKE, ThreadPlace, find_outermost
from zerotop.analysis.findings.support.steps.lost_time import LEAST_COST
from zerotop.analysis.stats.medians import compute_known_median
from zerotop_probe.recording.events import BusyThread

_KIND = FindingKind(
    name="piled_threads",
    confidence=0.85,
    headline="{threads:.0f} threads run {function}: more and more since about step {step}",
    details=(
        "They began one after another, the last one in step {last_step}, and none has ended: all use {cores:.1f} cores"
        " together, at {place}.[ Iterations take {after_s:seconds} instead of {before_s:seconds} before the second one.]"
    ),
    advice="End each of them when it is no longer needed, or start one for the whole run.",
    fix="{place}",
    lasts=True,
)
# Steps between the begins of two.
_STEPS_APART = 5
# How far samples are looked back at (ns), and for how long a thread that computes may not be among the busiest ones (ns).
_LOOK_BACK_NS, _UNSEEN_NS = 600_000_000_000, 3_000_000_000
# A thread computes from this share of a core on.
_USED_CORES = 0.02
# The part of the lost time in which they compute, at least: the training thread waits for them.
_EXPLAINED_SHARE = 1 / 3
# The last steps that show how long iterations take now.
_LATEST_STEPS = 20


@in_each_rank(kinds=None)
def detect(window: SearchWindow[Process]) -> Iterator[Finding | None]:
    """Report threads once several of a function compute at once, and again with each more."""
    piles = window.keep(dict[tuple[str, str], dict[int, ThreadPlace]])
    for event in window.items(window.subject.events_of(BusyThread)):
        place = find_outermost(event)
        if place is not None and event.tid is not None:
            pile = piles.setdefault((place.file, place.function), {})
            pile[event.tid] = place
            if len(pile) >= FEWEST_ALIKE:
                yield _judge(window.subject, pile, event.unix_ns)


def _judge(process: Process, pile: dict[int, ThreadPlace], known_ns: int) -> Finding | None:
    """Return the finding about these threads (by id) as known at a time; None if they began together, or few compute."""
    records = process.at.records("threads", process.host, "pid", process.pid)
    samples = records.read_window(known_ns - _LOOK_BACK_NS, known_ns)
    is_used = samples.rows["cores_used"] >= _USED_CORES
    seen = {tid: (is_used & (samples.rows["tid"] == tid)).nonzero()[0] for tid in pile}
    alive = {tid: at for tid, at in seen.items() if len(at) and samples.times[at[-1]] >= known_ns - _UNSEEN_NS}
    begins = sorted(process.step_at(int(samples.times[at[0]])) or 0 for at in alive.values())
    if len(begins) < FEWEST_ALIKE or np.median(np.diff(begins)) < _STEPS_APART:
        return None
    steps = process.steps_until(known_ns)
    rows = steps[steps["step"] >= begins[1]]
    before, after = (
        compute_known_median(part["iteration_s"]) for part in (steps[steps["step"] < begins[1]], rows[-_LATEST_STEPS:])
    )
    if not len(rows):
        return None
    cores = sum(float(np.median(samples.rows["cores_used"][at[-_LATEST_STEPS:]])) for at in alive.values())
    cost = 1 - before / after  # NaN if unknown
    if not (cost >= LEAST_COST and cores >= _EXPLAINED_SHARE * cost):
        cost = 0.0
    kind = _KIND if cost else _KIND.with_changes(severity=Severity.INFO, advice="", fix="")
    place = pile[max(pile)]
    evidence = {"threads": float(len(alive)), "cores": cores}
    evidence |= {"before_s": before, "after_s": after} if cost else {}
    return kind.at_steps(
        process,
        rows,
        evidence,
        known_ns=known_ns,
        cost=cost,
        function=place.function,
        place=f"{place.file}:{place.line}",
        last_step=begins[-1],
    )
