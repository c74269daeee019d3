"""The attempts of a job: launchers and scripts start all ranks again after a failure, and some attempts never train.

Read from the processes that samplers found and from the ranks' own events. Two programs that a script runs one after the
other are no attempts: an attempt is followed by another one of the same script only after it has failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerotop.analysis.failures.launcher_reports import LauncherReport
from zerotop.analysis.failures.rank_ends import RankEnd, find_ends, read_printed_ends
from zerotop.analysis.failures.tracebacks import Traceback
from zerotop.recording.keys import ProcessKey, RankProcess, identify_process
from zerotop.recording.moments.at import At
from zerotop.recording.moments.process_exits import read_exits, read_launcher
from zerotop.recording.reader import Source
from zerotop_probe.recording import events

# A table may be created this long before a sampler finds its process.
_FOUND_NS = 6 * 10**9


@dataclass(frozen=True, slots=True)
class Attempt:
    """The processes that were started together, and how the first of them failed."""

    number: int  # counted from 1
    processes: tuple[RankProcess, ...]
    begin_ns: int  # unix time at which the first of them was found
    end: RankEnd | None  # None if it did not fail, or still runs
    known_ns: int  # when its end was known
    step: int | None  # in which the failed rank ended; None before the first one

    @property
    def cause(self) -> str:
        """The exception, signal or exit code that ended it, in a word or two; "" where that is not known."""
        if self.end is None:
            return ""
        if self.end.signal_name is not None:
            return self.end.signal_name
        if self.end.traceback is not None:
            return self.end.traceback.error
        return f"exit code {self.end.exit_code}" if self.end.exit_code else ""

    def describe_place(self) -> str:
        """Return when it failed, as the end of a phrase."""
        return "before its first step" if self.step is None else f"at step {self.step}"


def read_attempts(at: At) -> list[Attempt]:
    """Return the attempts up to the cursor, oldest first: one if the job was never started again."""
    groups = _group_processes(at)
    if not groups:
        return []
    sources = {(identify_process(one), one.created_ns): one for one in at.sources["begins"] + at.sources["spans"]}
    launcher = read_launcher(at)
    chain: list[Attempt] = []
    for index, group in enumerate(groups):
        following = groups[index + 1] if index + 1 < len(groups) else None
        until_ns = following.begin_ns if following is not None else at.cursor_ns
        if chain and (chain[-1].end is None or not group.is_same_script):
            chain = []
        own = [one for (process, created_ns), one in sources.items() if group.owns(process, created_ns, until_ns)]
        is_restarted = following is not None and launcher not in ("", "python")
        attempt = _build_attempt(at.at(until_ns), len(chain) + 1, group, own, is_restarted=is_restarted)
        if attempt.end is None and following is not None:  # samplers miss a process up to a few seconds later
            until_ns = min(at.cursor_ns, following.found_ns)
            attempt = _build_attempt(at.at(until_ns), len(chain) + 1, group, own, is_restarted=is_restarted)
        chain.append(attempt)
    return chain


@dataclass
class _Processes:
    by_key: dict[ProcessKey, RankProcess]
    begin_ns: int
    found_ns: int  # when a sampler found the first one
    is_same_script: bool = True

    @property
    def ranks(self) -> set[int]:
        return {process.rank for process in self.by_key.values()}

    def owns(self, process: RankProcess, created_ns: int, until_ns: int) -> bool:
        return (process.host, process.pid) in self.by_key and created_ns <= until_ns


def _group_processes(at: At) -> list[_Processes]:
    """Return the processes of each attempt: a rank that appears again, or after all have ended, begins another one."""
    found: list[events.RankFound | events.Hello] = [
        *at.events_of(events.RankFound),
        *at.events_of(events.Hello),
    ]
    gone = {event.process_key: event.unix_ns for event in at.events_of(events.RankGone)}
    found_ns = {event.process_key: event.unix_ns for event in at.events_of(events.RankFound)}
    scripts = {event.process_key: _read_script(event) for event in at.events_of(events.Hello)}
    groups: list[_Processes] = []
    seen: set[ProcessKey] = set()
    for event in sorted(found, key=lambda event: event.unix_ns):
        key, rank = event.process_key, event.rank
        if key in seen or rank is None:
            continue
        seen.add(key)
        last = groups[-1] if groups else None
        ended = last is not None and all(gone.get(one, at.cursor_ns + 1) <= event.unix_ns for one in last.by_key)
        if last is None or rank in last.ranks or ended:
            known = {scripts[one] for one in (*(last.by_key if last is not None else ()), key) if one in scripts}
            groups.append(last := _Processes({}, event.unix_ns, found_ns.get(key, event.unix_ns), len(known) < 2))
        last.by_key[key] = RankProcess(key[0], key[1], rank)
    return groups


def _read_script(event: events.Hello) -> str:
    return next(iter(event.arguments or ()), "")


def _build_attempt(at: At, number: int, group: _Processes, sources: Sequence[Source], *, is_restarted: bool) -> Attempt:
    exits = read_exits(at)
    processes = tuple(sorted(group.by_key.values(), key=lambda process: process.rank))
    ends = {process: exits.find_exit_after(process.host, process.pid, group.begin_ns) for process in processes}
    known_ns = max((time_ns for time_ns in ends.values() if time_ns is not None), default=at.cursor_ns)
    end = next(iter(find_ends(at, _keep_one_each(sources))), None) if sources else None
    if end is None or (end.traceback is None and end.report is None):
        end = _find_printed_end(at, processes, group.begin_ns) or (end if is_restarted else None)
    if end is None and is_restarted:
        end = RankEnd(processes[0], None, None)
    step = _find_step(at, end.process, group.begin_ns) if end is not None else None
    return Attempt(number, processes, group.begin_ns, end, known_ns, step)


def _keep_one_each(sources: Sequence[Source]) -> list[Source]:
    return list({identify_process(source): source for source in sources}.values())


def _find_printed_end(at: At, processes: Sequence[RankProcess], begin_ns: int) -> RankEnd | None:
    """Return the end that a launcher, or an exception, printed about processes whose tables say nothing."""
    printed = read_printed_ends(at)
    pids = {process.pid: process for process in processes}
    reports = [one for one in printed.reports if one.pid in pids and one.time_ns >= begin_ns and one.exit_code]
    report: LauncherReport | None = next((one for one in reports if one.is_first), next(iter(reports), None))
    process = pids[report.pid] if report is not None and report.pid is not None else processes[0]
    raised = [one for one in printed.tracebacks if one.time_ns >= begin_ns and not one.is_lost_peer]
    own = [one for one in raised if one.pid == process.pid or one.rank == process.rank]
    own = own or [one for one in raised if one.rank is one.pid is None]
    traceback: Traceback | None = own[-1] if own and (report is None or report.exit_code > 0) else None
    return RankEnd(process, report, traceback) if report is not None or traceback is not None else None


def _find_step(at: At, process: RankProcess, begin_ns: int) -> int | None:
    """Return the step in which a process ended; None before its first step was finished."""
    for name in ("begins", "spans"):
        for source in at.process_sources(name, process.host, process.pid):
            rows = source.until(at.cursor_ns)[-1:]
            if source.rank == process.rank and source.created_ns >= begin_ns - _FOUND_NS and len(rows):
                return int(rows["step"][0])
    return None
