"""A job that ended normally, or was interrupted, stood still after its last phase: something had to end first."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from zerotop.analysis.findings.ranks.hung_ranks import SEEN_SECONDS, is_explained, is_hang, list_interrupts
from zerotop.analysis.findings.support import Finding, FindingKind, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.evidence import Evidence, Group, Process
from zerotop.analysis.findings.support.links import Kinds, was_interrupted
from zerotop.analysis.formatting import format_seconds
from zerotop.analysis.hangs.reader import StandstillReader
from zerotop.analysis.hangs.sentences import describe_odd, describe_threads, list_thread_places, write_advice
from zerotop.analysis.hangs.standstill import Standstill
from zerotop.analysis.hangs.waits import ENDS, WaitKind
from zerotop.recording.events.event_files import select_events
from zerotop_probe.recording.events import Goodbye, JobEnded, RankGone, StopSent

_KIND = FindingKind(
    name="long_end",
    confidence=0.9,
    headline="The end took {end_s:seconds}: {odd}",
    details="[{threads} ][{moved} ]No phase began or ended on any rank before the job {ended}.",
    advice="{advice}",
    fix="[{line}]",
    lost_once="waited_s",
    superseded_by=(Kinds(was_interrupted, "runs_after_end"),),
)
_UNSEEN = _KIND.with_changes(
    confidence=0.6,
    headline="The end took {end_s:seconds}",
    details="No phase began or ended on any rank before the job {ended}. No stacks were recorded.",
    advice="",
    fix="",
)
_AFTER_PYTHON = _UNSEEN.with_changes(
    headline="The end took {end_s:seconds}: rank {rank} ran exit functions for {waited_s:seconds}",
    details=(
        "Its process ended that long after Python's exit functions began. multiprocessing waits for child processes in one"
        " of them; then objects of libraries are destroyed."
    ),
)
_BEGIN_EARLIER = "Begin that work earlier, or give it less to do: the job keeps its cores and GPUs until it ends."
_KEPT_WORKERS = (
    "Delete the data loader, and iterators over it, in the script's last line: its workers are then told to end. Of a loader"
    " with persistent_workers that still exists at Python's exit, PyTorch waits up to 5 s for each worker in turn."
)
_BUSY_WORKERS = "PyTorch waits up to 5 s for each worker that was told to end: see what keeps them busy in the dataset."
# From this share of the time since the first step on.
_WARNING_SHARE = 0.05
# Without stacks, a job may take this long to evaluate or to save.
_UNSEEN_SECONDS = 30.0
# Ranks that end within this time of the last one stay as long as the job does.
_TOGETHER_NS = 3 * 10**9
_WIDTH = 80 - len("The end took 600 s: ")


class _End(NamedTuple):
    """Times of the end of an attempt (unix nanoseconds)."""

    since_ns: int  # the last phase of any rank
    arrived_ns: int  # since when it was seen to wait for what it waited for at last
    end_ns: int
    known_ns: int
    is_interrupted: bool = False


@in_each_attempt(kinds=1)
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report it once the job has ended with exit code 0."""
    recording, group = window.recording, window.subject
    ended = [one for one in recording.events_of(JobEnded) if one.unix_ns > group.lead.source.created_ns]
    if ended and all(one.exit_code == 0 for one in ended) and len(group.lead.steps):
        yield window.find_once(partial(_find_end, recording, group, ended[0].unix_ns))


def _find_end(recording: Evidence, group: Group, known_ns: int) -> Finding | None:
    goodbyes = {process.key: _find_goodbye(process) for process in group.processes}
    gone = [event for event in recording.events_of(RankGone) if event.process_key in goodbyes]
    if not all(goodbyes.values()) or any(event.exit_code for event in gone):
        return None
    end_ns = max(goodbyes.values())
    since_ns = max(_find_last_sign(process, end_ns) for process in group.processes)
    last = [process for process in group.processes if goodbyes[process.key] >= end_ns - _TOGETHER_NS]
    gone_ns = {event.process_key: event.unix_ns for event in gone}
    slowest = max(group.processes, key=lambda process: gone_ns.get(process.key, 0) - goodbyes[process.key])
    after_ns = gone_ns.get(slowest.key, 0) - goodbyes[slowest.key]
    if after_ns >= max(SEEN_SECONDS * 1e9, end_ns - since_ns):
        end = _End(since_ns, goodbyes[slowest.key], gone_ns[slowest.key], known_ns)
        return _build(group, _AFTER_PYTHON, end, ranks=[slowest.rank])
    if end_ns < since_ns + SEEN_SECONDS * 1e9 or is_explained(recording, group, since_ns, end_ns):
        return None
    is_interrupted = any(since_ns < time_ns <= known_ns for time_ns in list_interrupts(recording)) or bool(
        select_events(recording.events_of(StopSent), since_ns, known_ns)
    )
    reader = StandstillReader(recording.recording, [process.source for process in last], since_ns, end_ns)
    standstill = reader.read_at(end_ns - 1, confirmed=True)
    if standstill is None:
        is_long = end_ns >= since_ns + _UNSEEN_SECONDS * 1e9 and not reader.written_ns
        return _build(group, _UNSEEN, _End(since_ns, since_ns, end_ns, known_ns, is_interrupted)) if is_long else None
    wait = (standstill.odd or standstill.groups[0]).wait
    if not (wait is not None and wait.kind in ENDS) and not is_hang(group, standstill, since_ns, end_ns):
        return None
    end = _End(since_ns, reader.find_arrival(since_ns), end_ns, known_ns, is_interrupted)
    return _build_seen(group, end, standstill)


def _find_goodbye(process: Process) -> int:
    return min((event.unix_ns for event in process.events_of(Goodbye)), default=0)


def _find_last_sign(process: Process, end_ns: int) -> int:
    """Return when a process last began or ended a phase."""
    known = [process.records(table).read_window(process.source.created_ns, end_ns).times for table in ("begins", "spans")]
    return max(int(times[-1]) for times in known if len(times)) if any(map(len, known)) else end_ns


def _build_seen(group: Group, end: _End, standstill: Standstill) -> Finding:
    shown = standstill.odd or standstill.groups[0]
    lines = [shown.place.partition(" in ")[0]] if shown.frame is not None and shown.frame.own else []
    lines = lines or list_thread_places(standstill)
    seen_s = (end.end_ns - end.arrived_ns) / 1e9
    return _build(
        group,
        _KIND,
        end,
        ranks=list(shown.ranks),
        odd=describe_odd(standstill, _WIDTH),
        threads=describe_threads(standstill) or None,
        moved=f"It was seen there in the last {format_seconds(seen_s)}." if end.arrived_ns > end.since_ns else None,
        advice=_choose_advice(standstill, shown.wait.kind if shown.wait is not None else None, lines),
        line=lines[0] if len(lines) == 1 else None,
    )


def _choose_advice(standstill: Standstill, kind: WaitKind | None, lines: list[str]) -> str:
    if kind is WaitKind.WORKERS:  # without a line of the script, Python has ended it
        return _BUSY_WORKERS if lines else _KEPT_WORKERS
    return _BEGIN_EARLIER if kind in (*ENDS, WaitKind.LOCK) else write_advice(standstill)


def _build(group: Group, kind: FindingKind, end: _End, **values: Any) -> Finding:
    waited_s = (end.end_ns - end.arrived_ns) / 1e9
    share = waited_s / max(waited_s, (end.end_ns - int(group.lead.steps["begin_unix_ns"][0])) / 1e9)
    kind = kind.with_changes(severity=Severity.WARNING if share >= _WARNING_SHARE else Severity.INFO)
    evidence = {"end_s": (end.end_ns - end.since_ns) / 1e9, "waited_s": waited_s}
    evidence |= {"interrupted": 1.0} if end.is_interrupted else {}
    values["ended"] = "was interrupted" if end.is_interrupted else "ended normally"
    return kind.at(group, end.since_ns, end.end_ns, evidence, known_ns=end.known_ns, cost=share, **values)
