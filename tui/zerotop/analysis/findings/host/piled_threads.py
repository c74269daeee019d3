"""Python threads of one function that the job starts one after another, and does not end: they compute beside each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Process, SearchWindow, Severity, in_each_rank
from zerotop.analysis.findings.support.started_threads import FEWEST_ALIKE, ThreadPlace, find_outermost
from zerotop.analysis.findings.support.steps.lost_time import LEAST_COST
from zerotop.analysis.stats.medians import compute_known_median
from zerotop.recording.samples import Samples
from zerotop_probe.recording.events import BusyThread

_KIND = FindingKind(
    name="piled_threads",
    confidence=0.85,
    headline="{threads:.0f} threads run {function}: more and more since about step {step}",
    details=(
        "They began one after another, the last one near step {last_step}, and compute at the same time: {cores:.1f} cores"
        " together, at {place}.[ Iterations take {after_s:seconds} instead of {before_s:seconds} before the second one.]"
    ),
    advice="End each of them when it is no longer needed, or start one for the whole run.",
    fix="{place}",
    lasts=True,
)
# The median number of steps between the begins of two.
_STEPS_APART = 5
# How long before the probe's look a thread may have begun (ns): it looks at one thread at a time. And for how long one that
# computes may not be among the busiest threads, which are recorded (ns).
_LOOK_BACK_NS, _UNSEEN_NS = 30_000_000_000, 3_000_000_000
# A thread computes from this share of a core on.
_USED_CORES = 0.02
# They explain lost time if they use at least this share of a core for each share of it.
_EXPLAINED_SHARE = 1 / 3
# The last steps that show how long iterations take now.
_LATEST_STEPS = 20


class _Thread(NamedTuple):
    tid: int
    place: ThreadPlace
    first_ns: int  # when it was first seen to compute


@in_each_rank(kinds=None)
def detect(window: SearchWindow[Process]) -> Iterator[Finding | None]:
    """Report threads once several of a function compute at once, and again with each more."""
    piles = window.keep(dict[tuple[str, str], dict[int, _Thread]])
    for event in window.items(window.subject.events_of(BusyThread)):
        thread = _read_thread(window.subject, event)
        if thread is not None:
            pile = piles.setdefault((thread.place.file, thread.place.function), {})
            pile.setdefault(thread.tid, thread)
            if len(pile) >= FEWEST_ALIKE:
                yield _judge(window.subject, list(pile.values()), event.unix_ns)


def _read_thread(process: Process, event: BusyThread) -> _Thread | None:
    """Return the thread of an event; None for one of a pool or without own code, and where samples do not show its begin."""
    place = find_outermost(event)
    if place is None or event.tid is None:
        return None
    used = _read_uses(process, event.tid, event.begin_ns + process.source.offset_ns - _LOOK_BACK_NS, event.unix_ns)
    return _Thread(event.tid, place, int(used.times[0])) if len(used) else None


def _read_uses(process: Process, tid: int, begin_ns: int, end_ns: int) -> Samples:
    """Return the samples of a thread between two moments in which it computed."""
    samples = process.at.records("threads", process.host, "pid", process.pid).read_window(begin_ns, end_ns)
    if not len(samples):
        return samples
    return samples.select((samples.rows["tid"] == tid) & (samples.rows["cores_used"] >= _USED_CORES))


def _judge(process: Process, pile: list[_Thread], known_ns: int) -> Finding | None:
    """Return the finding about these threads as known at a time; None if too few compute now, or they began together."""
    # One that ended before the last one began did not compute beside it.
    since_ns = max(known_ns - _UNSEEN_NS, *(thread.first_ns + 1 for thread in pile))
    uses = {thread: _read_uses(process, thread.tid, since_ns, known_ns) for thread in pile}
    busy = [thread for thread in pile if len(uses[thread])]
    begins = sorted(process.step_at(thread.first_ns) or 0 for thread in busy)
    if len(begins) < FEWEST_ALIKE or np.median(np.diff(begins)) < _STEPS_APART:
        return None
    steps = process.steps_until(known_ns)
    rows = steps[steps["step"] >= begins[1]]
    before, after = (
        compute_known_median(part["iteration_s"]) for part in (steps[steps["step"] < begins[1]], rows[-_LATEST_STEPS:])
    )
    if not len(rows):
        return None
    cores = sum(float(np.median(uses[thread].rows["cores_used"])) for thread in busy)
    cost = 1 - before / after  # NaN if unknown
    if not (cost >= LEAST_COST and cores >= _EXPLAINED_SHARE * cost):
        cost = 0.0
    kind = _KIND if cost else _KIND.with_changes(severity=Severity.INFO, advice="", fix="")
    place = busy[-1].place
    evidence = {"threads": float(len(busy)), "cores": cores}
    evidence |= {"before_s": before, "after_s": after} if cost else {}
    values = {"function": place.function, "place": f"{place.file}:{place.line}", "last_step": begins[-1]}
    return kind.at_steps(process, rows, evidence, known_ns=known_ns, cost=cost, **values)
