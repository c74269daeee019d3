"""No phase begins or ends on any rank for far longer than an iteration takes: one hangs, and the others wait for it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Ints, Samples
from zerotop_probe.recording.tables import PHASES

_KIND = FindingKind(
    name="hung_ranks",
    severity=Severity.ERROR,
    confidence=0.6,
    headline="Training has stood still for {silent_s:seconds}[: rank {hung_rank} is behind, in {phase}]",
    details=(
        "No phase has begun or ended on {count:count rank}; iterations take {iteration_s:seconds}[. While rank {hung_rank}"
        " is in {phase}, the others are in {others}]."
    ),
    advice="See which line {hung} stands at.",
    fix="py-spy dump --pid {pid}",
)
# So many times the longest of the last iterations, and at least so many seconds.
HANG_ITERATIONS = 10.0
HANG_SECONDS = 30.0

# Phases that may take long without a sign of life.
_SILENT_PHASES = ("init", "checkpoint_save", "checkpoint_load")
# Events of a rank that ends, and of one whose probe is removed.
_LAST_EVENTS = ("goodbye", "left")
# A phase in progress began at most so long before the last sign of life.
_LOOK_BACK_NS = 3600 * 10**9


class _State:
    last_heard_ns = 0  # when a phase began or ended last


def detect(recording: Evidence) -> Iterator[Annotation | None]:
    """Report each silence of an attempt when it has lasted long enough, whether or not it ends."""
    for group in recording.groups:
        if len(group.lead.steps):
            yield from _check_group(recording, group)


def _check_group(recording: Evidence, group: Group) -> Iterator[Annotation | None]:
    state = group.get_state(_State)
    state.last_heard_ns = state.last_heard_ns or int(group.lead.steps["end_unix_ns"][0])
    times = []
    for process in group.processes:
        times += [process.read_new(records, _KIND.name).times for records in (process.begins, process.spans)]
    fresh = np.sort(np.concatenate(times))
    heard = np.concatenate([[state.last_heard_ns], fresh[fresh >= state.last_heard_ns]])
    state.last_heard_ns = int(heard[-1])
    silences = np.append(heard[1:], recording.cursor_ns) - heard
    for index in np.flatnonzero(silences >= HANG_SECONDS * 1e9).tolist():
        since_ns = int(heard[index])
        before = group.lead.steps_until(since_ns)["iteration_s"][-20:]
        longest = max(HANG_SECONDS, HANG_ITERATIONS * float(before.max()))
        known_ns = since_ns + int(longest * 1e9)
        is_over = known_ns > min(_find_end(recording, group), recording.cursor_ns)
        if silences[index] >= longest * 1e9 and not is_over and not _is_explained(recording, group, since_ns, known_ns):
            last = [process.begins.read_window(since_ns - _LOOK_BACK_NS, since_ns) for process in group.processes]
            if not any(len(part) and _name_phase(part) in _SILENT_PHASES for part in last):
                yield _build_finding(group, last, since_ns, known_ns, float(np.median(before)))


def _is_explained(recording: Evidence, group: Group, since_ns: int, until_ns: int) -> bool:
    """Whether a rank could not write its phases, for example to a full disk, or was stopped by a signal."""
    keys = {process.key for process in group.processes}
    causes = [event for process in group.processes for event in process.events_named("records_lost")]
    causes += [event for event in recording.events_named("rank_stopped") if (event.host, event.facts.get("pid")) in keys]
    return any(since_ns <= event.unix_ns <= until_ns for event in causes)


def _find_end(recording: Evidence, group: Group) -> int:
    """When the first of the ranks, or the job, is known to have ended or to report nothing more."""
    keys = {process.key for process in group.processes}
    ends = [event.unix_ns for event in recording.events_named("rank_gone") if (event.host, event.facts.get("pid")) in keys]
    ends += [
        event.unix_ns
        for process in group.processes
        for name in _LAST_EVENTS
        for event in process.events_named(name)
        if event.unix_ns > process.source.created_ns
    ]
    created_ns = group.lead.source.created_ns
    ends += [event.unix_ns for event in recording.events_named("job_ended") if event.unix_ns > created_ns]
    return min(ends, default=np.iinfo(np.int64).max)


def _build_finding(group: Group, last: list[Samples], since_ns: int, known_ns: int, usual_s: float) -> Annotation:
    """``last``: the phases that each process has begun, the last one in progress."""
    reached: Ints = np.array([part.times[-1] if len(part) else 0 for part in last])
    slowest = int(np.argmin(reached))
    behind_s = float(np.median(reached) - reached[slowest]) / 1e9
    is_behind = len(reached) > 1 and behind_s > 0
    rank = group.processes[slowest].rank
    others = sorted({_name_phase(part) for index, part in enumerate(last) if index != slowest})
    return _KIND.with_changes(confidence=0.8 if is_behind else 0.6).at(
        group,
        since_ns,
        known_ns,
        {"silent_s": (known_ns - since_ns) / 1e9, "iteration_s": usual_s, "behind_s": behind_s},
        ranks=[rank] if is_behind else None,
        count=len(last),
        hung_rank=rank if is_behind else None,
        phase=_name_phase(last[slowest]),
        others=" and ".join(others) if others and is_behind else None,
        hung="the rank that is behind" if is_behind else "each rank",
        pid=group.processes[slowest].source.pid,
        cost=1.0,
    )


def _name_phase(part: Samples) -> str:
    code = int(part.rows["phase"][-1]) if len(part) else 0
    return PHASES[code] if code < len(PHASES) else "a phase"
