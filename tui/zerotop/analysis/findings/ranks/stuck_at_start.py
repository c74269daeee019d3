"""A job stands still before its first step: a rank is missing, a lock is held, or a loader delivers no data."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import numpy as np

from zerotop.analysis.findings.support import Evidence, Finding, FindingKind, SearchWindow, Severity, in_job
from zerotop.analysis.findings.support.thresholds import BUSY_CORES
from zerotop.analysis.formatting import format_percent, format_ranks
from zerotop.analysis.hangs.sentences import ALL_STACKS, describe_group, describe_odd, write_advice
from zerotop.analysis.hangs.stacks import SILENT, read_silent_stacks
from zerotop.analysis.hangs.standstill import StackGroup
from zerotop.analysis.hangs.start import Start, find_awaited, find_standstill
from zerotop.analysis.hangs.waits import LONG_WORK, WaitKind
from zerotop.recording.keys import RankProcess
from zerotop.recording.samples import read_column
from zerotop_probe.recording import events

_KIND = FindingKind(
    name="stuck_at_start",
    severity=Severity.ERROR,
    confidence=0.8,
    lost_once="silent_s",
    headline="Stuck at the start for {silent_s:seconds}: {odd}",
    details="[{groups} ]No rank has moved on since then.",
    advice=f"{{advice}} {ALL_STACKS}",
    fix="[{line}]",
)
_ATTACHED = _KIND.with_changes(
    headline="No rank has moved for {silent_s:seconds}: {odd}",
    details="[{groups} ][{use}. ]The job was like this when zerotop attached.",
)
_AWAITED = _ATTACHED.with_changes(
    headline="Others have waited {silent_s:seconds} for {odd}",
    details="[{groups} ]{use}.",
    advice=f"See what keeps that line busy: the others wait until it is done. {ALL_STACKS}",
    severity=Severity.WARNING,
)
_LOCKED = _KIND.with_changes(
    headline="Stuck at the start for {silent_s:seconds}: the ranks wait for a lock that no process holds",
    details=(
        "[{groups} ]No process that is visible on their node holds {locks}, and nothing compiles: a build may have"
        " been killed."
    ),
    advice=(
        "Unless another job builds there, stop this one, delete {it} and start it again. Ranks that go on would load a"
        " library that was never built."
    ),
    fix="rm {files}",
)
_OVER = _KIND.with_changes(
    severity=Severity.INFO,
    headline="No rank moved for {silent_s:seconds}[ {when}]: {odd}",
    details="Then they moved on[: the first step began {later_s:seconds} later].",
    advice="",
    fix="",
)
_AWAITED_OVER = _OVER.with_changes(headline="Others waited {silent_s:seconds} for {odd}")
# Events from before the first step are read at most this much later (ns).
_LATE_NS = 10 * 10**9
_MOST_USES = 8
# Longest text in the headline beside the duration.
_ODD_WIDTH = 80 - len("Stuck at the start for 600 s: ")
# Ranks that did nothing have moved on if one of them computes for so long without a pause: one that gives up ends sooner.
_MOVING_NS = 10 * 10**9
# Looks at the same standstill differ by at most this much in when it began (ns).
_SAME_NS = 2 * 10**9


@in_job(kinds=None)
def detect(window: SearchWindow[Evidence]) -> Iterator[Finding]:
    """Report if all ranks stand still before the first step, unless one of them does work that merely takes long.

    It is told again while it lasts, when the ranks have moved on, and when the first step has ended.
    """
    recording = window.recording
    told: list[tuple[Start, Finding]] = window.keep(list)  # the standstill that was told, as it was seen each time
    moved: list[int] = window.keep(list, "moved")  # when it was known that they had moved on since then
    ends = [int(group.lead.steps["end_unix_ns"][0]) for group in recording.groups if len(group.lead.steps)]
    first_ns = min(ends, default=recording.cursor_ns + 1)
    window.is_closed = bool(ends) and recording.cursor_ns > first_ns + _LATE_NS
    silent = [event for event in recording.events_of(events.Stacks) if event.why == SILENT]
    times = sorted(one.unix_ns for one in (*recording.events_of(events.RankStacks), *silent) if one.unix_ns < first_ns)
    for time_ns in window.items(times):
        yield from _tell_progress(recording, told, moved, time_ns)
        start = find_standstill(recording.at.at(time_ns))
        if start is not None and _is_stuck(recording, start, time_ns):
            start = _continue(told, start)
            yield from _tell(told, moved, start, _build_finding(recording, start, time_ns))
        awaited = find_awaited(recording.at.at(time_ns))
        if awaited is not None and (use := _describe_use(recording, awaited, time_ns)):
            awaited = _continue(told, awaited)
            yield from _tell(told, moved, awaited, _build_awaited(awaited, time_ns, use))
    yield from _tell_progress(recording, told, moved, min(first_ns - 1, recording.cursor_ns))
    if ends and told:
        yield _build_over(recording, *told[-1], moved, first_ns)


def _continue(told: list[tuple[Start, Finding]], start: Start) -> Start:
    """Return a standstill with the begin of the one that was told, if it is the same."""
    since_ns = told[-1][0].since_ns if told else start.since_ns
    return start._replace(since_ns=since_ns) if abs(start.since_ns - since_ns) <= _SAME_NS else start


def _tell(told: list[tuple[Start, Finding]], moved: list[int], start: Start, finding: Finding) -> Iterator[Finding]:
    """Yield the finding if it is the first, or about the same standstill as the one before, or one after that has ended."""
    if not told or (start.since_ns > told[-1][1].known_ns if moved else finding.event == told[-1][1].event):
        moved.clear()
        told.append((start, finding))
        yield finding


def _tell_progress(
    recording: Evidence, told: list[tuple[Start, Finding]], moved: list[int], until_ns: int
) -> Iterator[Finding]:
    """Yield, once, that the ranks of a reported standstill have moved on, if that is known by a given time."""
    if told and not moved and (known_ns := _find_progress(recording, *told[-1], until_ns)) is not None:
        moved.append(known_ns)
        yield _build_over(recording, *told[-1], moved, known_ns)


def _find_progress(recording: Evidence, start: Start, told: Finding, until_ns: int) -> int | None:
    """Return when it was known that ranks have moved on since they were told to be stuck; None if nothing shows it.

    Only a rank that did nothing can show it: others may wait in a busy loop, or be the one that is waited for.
    """
    ended = [one.unix_ns for one in recording.at.at(until_ns).events_of(events.JobEnded) if one.exit_code == 0]
    found = [time_ns for time_ns in ended if time_ns > told.known_ns]
    for one in (stacks for group in start.standstill.groups for stacks in group.stacks):
        if _computes(recording, one.process, start.since_ns, told.known_ns):
            continue
        later = read_silent_stacks(recording.at.recording, one.process, told.known_ns, until_ns)
        found += [look.time_ns for look in later if look.training.own_frame != one.training.own_frame]
        begun_ns = 0
        samples = recording.at.records("processes", one.process.host, "pid", one.process.pid)
        window = samples.read_window(told.known_ns, until_ns)
        for time_ns, used in zip(window.times.tolist(), read_column(window.rows, "cores_used").tolist(), strict=True):
            begun_ns = (begun_ns or time_ns) if used >= BUSY_CORES else 0
            if begun_ns and time_ns - begun_ns >= _MOVING_NS:
                found.append(time_ns)
                break
    return min(found, default=None)


def _is_stuck(recording: Evidence, start: Start, time_ns: int) -> bool:
    """Whether no rank does work that merely takes long, as far as stacks show.

    Ranks that wait for others may do so in a busy loop. If all of them are in the same collective, they may be copying a
    model.
    """
    groups = start.standstill.groups
    late = [group for group in groups if not group.awaits_others]
    if not late and any(group.wait is None or group.wait.kind is not WaitKind.COLLECTIVE for group in groups):
        return False  # a first backward may take any time
    may_train = bool(recording.events_of(events.Attached)) or bool(recording.events_of(events.ProbeMissing))
    if may_train and any(one.idle_s == 0 for group in late or groups for one in group.stacks):
        return False  # a rank that is well may be seen in the same line twice
    checked = late if late or len(groups) > 1 else groups
    return not any(_is_working(recording, group, start, time_ns) for group in checked)


def _is_working(recording: Evidence, group: StackGroup, start: Start, time_ns: int) -> bool:
    """Whether a rank loads, compiles, waits for a server or computes."""
    if group.wait is not None and group.wait.kind in LONG_WORK:
        return group.wait.kind is not WaitKind.BUILD_LOCK or not _list_stale_locks(recording, time_ns)
    return any(_computes(recording, process, start.since_ns, time_ns) for process in group.processes)


def _computes(recording: Evidence, process: RankProcess, begin_ns: int, end_ns: int) -> bool:
    """Whether a process uses, or waits for, a core."""
    rows = recording.at.records("processes", process.host, "pid", process.pid).read_window(begin_ns, end_ns).rows
    wanted = rows["cores_used"] + np.nan_to_num(rows["waiting_cores"])
    return len(rows) > 0 and float(np.nan_to_num(wanted).mean()) >= BUSY_CORES


def _describe_use(recording: Evidence, start: Start, time_ns: int) -> str:
    """Return the processor use of each rank since the job was attached to."""
    cores, gpus = [], []
    for group in start.standstill.groups:
        for process in group.processes[:_MOST_USES]:
            used = _read_mean(recording, start, time_ns, process, "processes", "cores_used")
            computing = _read_mean(recording, start, time_ns, process, "gpu_processes", "sm_percent")
            cores += [(process.rank, f"{used:.1f}")] if used is not None else []
            gpus += [(process.rank, format_percent(computing / 100))] if computing is not None else []
    said = [
        f"{name} used: {', '.join(f'rank {rank} {use}' for rank, use in sorted(uses)[:_MOST_USES])}"
        for name, uses in (("Cores", cores), ("GPU", gpus))
        if uses
    ]
    return ". ".join(said)


def _read_mean(
    recording: Evidence, start: Start, time_ns: int, process: RankProcess, table: str, column: str
) -> float | None:
    """Return the mean of a column of a process's samples since it was attached to; None if nothing was measured."""
    rows = recording.at.records(table, process.host, "pid", process.pid).read_window(start.since_ns, time_ns).rows
    values = read_column(rows, column) if len(rows) else np.empty(0)
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _build_awaited(start: Start, known_ns: int, use: str) -> Finding:
    late = [group for group in start.standstill.groups if not group.awaits_others]
    shown = late[0]
    place = shown.place.partition(" in ")[0]
    return _AWAITED.at(
        None,
        start.since_ns,
        known_ns,
        {"silent_s": (known_ns - start.since_ns) / 1e9},
        ranks=sorted(rank for group in late for rank in group.ranks),
        odd=f"{format_ranks(shown.ranks)} at {place}" if len(late) == 1 else f"{len(late)} groups of ranks",
        groups=" ".join(f"{describe_group(group)}." for group in start.standstill.groups),
        use=use,
        line=place or None,
        cost=1.0,
    )


def _build_finding(recording: Evidence, start: Start, known_ns: int) -> Finding:
    odd, groups = start.standstill.odd, start.standstill.groups
    shown = odd if odd is not None else groups[0]
    ranks = sorted(rank for group in groups for rank in group.ranks)
    said = describe_odd(start.standstill, _ODD_WIDTH)
    others = [group for group in groups if (group is not odd and len(groups) > 1) or group.place not in said]
    is_awaited = any(group.awaits_others for group in groups)
    is_attached = bool(recording.events_of(events.Attached))
    if shown.wait is not None and shown.wait.kind is WaitKind.BUILD_LOCK:
        return _build_locked(recording, start, known_ns)
    kind = (_ATTACHED if is_attached else _KIND).with_changes(severity=Severity.ERROR if is_awaited else Severity.WARNING)
    return kind.at(
        None,
        start.since_ns,
        known_ns,
        {"silent_s": (known_ns - start.since_ns) / 1e9},
        ranks=list(odd.ranks) if odd is not None else ranks,
        odd=said,
        use=_describe_use(recording, start, known_ns) or None,
        groups=" ".join(f"{describe_group(one)}." for one in others) or None,
        advice=write_advice(start.standstill),
        line=shown.place.partition(" in ")[0] or None,
        cost=1.0,
    )


def _build_over(recording: Evidence, start: Start, told: Finding, moved: list[int], known_ns: int) -> Finding:
    """Build the finding about a standstill that has ended. ``known_ns``: when that was known."""
    groups = start.standstill.groups
    is_awaited = told.kind is not None and told.kind.headline == _AWAITED.headline
    late = [group for group in groups if not group.awaits_others] if is_awaited else [start.standstill.odd or groups[0]]
    shown = late[0]
    place = shown.place.partition(" in ")[0] if is_awaited else shown.place
    who = "all ranks" if len(groups) == 1 and len(shown.ranks) > 1 else format_ranks(shown.ranks)
    steps = (group.lead.steps for group in recording.groups if len(group.lead.steps))
    begun_ns = min((int(one["begin_unix_ns"][0]) for one in steps if one["end_unix_ns"][0] <= known_ns), default=None)
    until_ns = max(told.known_ns, *moved, begun_ns or 0)
    moved_ns = max(told.known_ns, _find_moved(recording, start, told.known_ns, until_ns))
    later = {} if begun_ns is None else {"later_s": max(0, begun_ns - moved_ns) / 1e9}
    return (_AWAITED_OVER if is_awaited else _OVER).at(
        None,
        start.since_ns,
        moved_ns,
        {"silent_s": (moved_ns - start.since_ns) / 1e9, **later},
        known_ns=known_ns,
        ranks=told.ranks,
        odd=f"{who} {'were' if len(shown.ranks) > 1 else 'was'} at {place}",
        when=None if recording.events_of(events.Attached) else "at the start",
    )


def _find_moved(recording: Evidence, start: Start, after_ns: int, until_ns: int) -> int:
    """Return when a rank that stood still used a core again; ``until_ns`` if samples do not show that."""
    for group in start.standstill.groups:
        for process in group.processes:
            records = recording.at.records("processes", process.host, "pid", process.pid)
            samples = records.read_window(after_ns, until_ns)
            busy = np.flatnonzero(samples.rows["cores_used"] >= BUSY_CORES)
            until_ns = int(samples.times[busy[0]]) if len(busy) else until_ns
    return until_ns


def _list_stale_locks(recording: Evidence, time_ns: int) -> list[str]:
    return list(dict.fromkeys(one.path for one in recording.events_of(events.BuildLocked) if one.unix_ns <= time_ns))


def _build_locked(recording: Evidence, start: Start, known_ns: int) -> Finding:
    locks = _list_stale_locks(recording, known_ns)
    return _LOCKED.at(
        None,
        start.since_ns,
        known_ns,
        {"silent_s": (known_ns - start.since_ns) / 1e9},
        ranks=sorted(rank for group in start.standstill.groups for rank in group.ranks),
        groups=" ".join(f"{describe_group(one)}." for one in start.standstill.groups),
        locks=" and ".join(locks),
        it="it" if len(locks) == 1 else "them",
        files=shlex.join(locks),
        cost=1.0,
    )
