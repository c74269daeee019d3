"""The rank that failed first, and how it ended: from launchers' messages, tracebacks, and processes that vanished.

Ranks that fail after the first one fail because of it: they lose their connections to it, or the launcher ends them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import inf
from pathlib import PurePath

from zerotop.analysis.failures.launcher_reports import LauncherReport, find_stop, parse_reports
from zerotop.analysis.failures.senders import find_senders
from zerotop.analysis.failures.tracebacks import Traceback, find_interrupts, parse_tracebacks
from zerotop.analysis.formatting import format_ranks
from zerotop.recording.keys import RankProcess, identify_process
from zerotop.recording.moments.at import At
from zerotop.recording.moments.process_exits import ProcessExit, find_first_exit, find_signal_name, read_exits
from zerotop.recording.output.tail import read_last_lines
from zerotop.recording.reader import Source
from zerotop_probe.recording.events import ExitCall, Goodbye, Hello, JobEnded, JobStarted, OutputFiles, RankFound, RankGone

# A launcher ends the ranks that are left with these.
_LAUNCHER_SIGNALS = (signal.SIGTERM, signal.SIGKILL)
# A traceback that was printed longer before the end was survived.
_LAST_WORDS_NS = 60 * 10**9
# The sampler looks for ended ranks now and then. It reports the ranks of one look within this time, in any order.
ONE_LOOK_NS = 50_000_000
# The sampler may see the end of a job's command this much later than that of the process in it (ns).
_ONE_END_NS = 10**9
# Of ranks gone in one look, one that still recorded this long after another's last record outlived it.
_OUTLIVED_NS = 2 * 10**9
# The end of the path of Ray's script for workers.
_RAY_WORKER = ("_private", "workers", "default_worker.py")
_SIGNAL_NAMES = {int(one): one.name for one in signal.Signals}
_SIGNAL_NUMBERS = {name: number for number, name in _SIGNAL_NAMES.items()}


@dataclass(frozen=True, slots=True)
class RankEnd:
    """The end of a rank, as far as known."""

    process: RankProcess
    report: LauncherReport | None
    traceback: Traceback | None
    seen_code: int | None = None  # the exit code that the sampler saw, negative for a signal
    has_left: bool = False  # it said goodbye: no signal ended it
    launcher: str = ""  # printed that it ends this rank, and not all of them
    with_signal: tuple[RankProcess, ...] = ()  # others that the same signal ended at the same time, as their launcher saw
    alongside: tuple[RankProcess, ...] = ()  # others that may have ended before it: nothing tells their order

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of which it is one, in order."""
        return tuple(sorted({self.process.rank, *(one.rank for one in self.alongside)}))

    @property
    def who(self) -> str:
        """The rank, as ``rank 1``, ``rank 0 or 1``, or ``one of ranks 0-7`` where the order is not known."""
        *_, last = ranks = self.ranks
        if len(ranks) > 2:
            return f"one of {format_ranks(ranks)}"
        return f"rank {ranks[0]} or {last}" if len(ranks) == 2 else f"rank {last}"

    @property
    def order_sentence(self) -> str:
        """A sentence that the order of the ends is not known; "" where it is."""
        if not self.alongside:
            return ""
        seconds = ONE_LOOK_NS / 1e9
        return f"{format_ranks(self.ranks).capitalize()} ended within {seconds:g} s: which was first is not known."

    @property
    def signal_number(self) -> int | None:
        """The signal that ended it; None where that is not known, or none did."""
        code = self._code or 0
        if code < 0:
            return -code
        # A code of the rank's own process is negative after a signal. That of a shell that ran it is 128 more.
        is_own = self.seen_code is not None or (self.report is not None and self.report.pid == self.process.pid)
        return None if self.has_left or is_own else _SIGNAL_NUMBERS.get(find_signal_name(code) or "")

    @property
    def _code(self) -> int | None:
        return self.report.exit_code if self.report is not None else self.seen_code

    @property
    def signal_name(self) -> str | None:
        number = self.signal_number
        return None if number is None else _SIGNAL_NAMES.get(number, f"signal {number}")

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None where that is not known, and after a signal."""
        return self._code if self.signal_number is None else None

    @property
    def is_consequence(self) -> bool:
        """Whether it ended because another rank had: it lost its connection, or the launcher ended it."""
        if self.traceback is not None and self.traceback.is_lost_peer:
            return True
        if self.traceback is not None or self.signal_number not in (None, *_LAUNCHER_SIGNALS):
            return False
        is_later = self.report is not None and not self.report.is_first and self.signal_number is not None
        return bool(self.launcher) or is_later


@dataclass(frozen=True, slots=True)
class PrintedEnds:
    """The messages and tracebacks about the ends of ranks in a job's output, up to a moment."""

    reports: tuple[LauncherReport, ...]
    tracebacks: tuple[Traceback, ...]
    stopped_ns: int | None  # when a launcher printed that it received a signal to end
    launchers: Mapping[int, str]  # that printed that they end a process, by its pid
    interrupts_ns: tuple[int, ...] = ()  # when processes printed that SIGINT had interrupted them

    def find_report(self, process: RankProcess, local_rank: int | None, since_ns: int) -> LauncherReport | None:
        """Return the launcher's report about a process that began at ``since_ns``."""
        reports = [one for one in self.reports if one.time_ns >= since_ns and _is_about(one, process, local_rank)]
        return next((one for one in reports if one.is_first), reports[0] if reports else None)

    def find_traceback(
        self, process: RankProcess, local_rank: int | None, since_ns: int, *, with_unmarked: bool
    ) -> Traceback | None:
        """Return the last exception that a process printed at or after ``since_ns``.

        ``with_unmarked``: tracebacks without a rank are its own.
        """
        printed = [one for one in self.tracebacks if one.time_ns >= since_ns and not one.thread]
        own = [one for one in printed if one.pid == process.pid or one.rank == process.rank]
        own += [one for one in printed if one.rank is None and local_rank is not None and one.local_rank == local_rank]
        if not own and with_unmarked:
            own = [one for one in printed if not one.is_marked]
        return own[-1] if own else None


def _is_about(report: LauncherReport, process: RankProcess, local_rank: int | None) -> bool:
    if report.is_unnamed:
        return False
    if report.pid is not None:
        return report.pid == process.pid
    return report.rank == process.rank if report.rank is not None else report.local_rank == local_rank


def read_printed_ends(at: At) -> PrintedEnds:
    """Read the end of a job's output up to the cursor."""
    streams = read_last_lines(at)
    reports = sorted(chain.from_iterable(map(parse_reports, streams)), key=lambda report: report.time_ns)
    tracebacks = sorted(chain.from_iterable(map(parse_tracebacks, streams)), key=lambda traceback: traceback.time_ns)
    stops = [time_ns for time_ns in map(find_stop, streams) if time_ns is not None]
    senders = chain.from_iterable(map(find_senders, streams))
    launchers = {one.pid: one.name for one in senders if one.pid is not None}
    interrupts = tuple(chain.from_iterable(map(find_interrupts, streams)))
    return PrintedEnds(tuple(reports), tuple(tracebacks), min(stops, default=None), launchers, interrupts)


def find_ends(at: At, sources: Sequence[Source]) -> list[RankEnd]:
    """Return how the ranks of one attempt ended up to the cursor, the first failure first; normal ends are left out.

    ``sources``: for each process, a table that it writes.
    """
    exits = read_exits(at)
    if all(exits.find_exit(source) is None for source in sources):
        return []
    printed = read_printed_ends(at)
    job = find_first_exit(at) if len(sources) == 1 and at.events_of(JobEnded) else None
    ended = [_read_end(at, source, exits.find_exit(source), printed) for source in sources]
    _merge_looks(ended)
    _assign_unnamed(ended, printed)
    # DeepSpeed's launcher names all of its ranks, and also the one that failed.
    launchers = {} if all(one.process.pid in printed.launchers for one in ended) else printed.launchers
    failed: list[tuple[bool, bool, int, int, RankEnd]] = []
    unordered: dict[RankProcess, _Ended] = {}
    for one in ended:
        report = one.report
        if one.exit_ns is None and report is None:
            continue
        if report is None and one.seen_code is None and job is not None and not _left_before(at, one, job, printed):
            report = read_job_end(at, job)
        ended_ns = one.exit_ns if one.exit_ns is not None else at.cursor_ns
        is_only = len(ended) == 1
        own_code = one.seen_code if is_only and one.seen_code != -signal.SIGINT else None
        code = report.exit_code if report is not None else own_code
        has_code = (report is None or report.is_first) and (code or 0) > 0
        traceback = one.find_traceback(printed, ended_ns, with_unmarked=has_code)
        # One that has called os._exit did not wait for its launcher's signal.
        launcher = "" if at.process_events(ExitCall, one.process) else launchers.get(one.process.pid, "")
        end = RankEnd(one.process, report, traceback, one.seen_code, not one.has_vanished, launcher)
        if one.has_vanished or traceback is not None or code:
            is_later = report is None or not report.is_first
            time_ns = traceback.time_ns if traceback is not None else ended_ns
            failed.append((end.is_consequence, is_later, time_ns, one.last_record_ns, end))
            is_named = report is not None and report.is_first and not report.is_unnamed
            if one.has_vanished and traceback is None and not is_named and not end.is_consequence:
                unordered[one.process] = one
    raised = [end for *_, end in failed if end.traceback is not None and not end.is_consequence]
    if raised and is_ray_worker(at, raised[0].process):
        # Ray ends all workers once one has raised, and may print that one's exception after their ends.
        failed = [item for item in failed if item[-1] in raised]
    ends = [end for *_, end in sorted(failed, key=lambda item: item[:4])]
    ends = [*_find_unrecorded(at, min(one.created_ns for one in ended), printed, ends), *ends]
    if ends and (together := _find_with_signal(ends[0], ends[1:], ended)):
        left = [end for end in ends[1:] if end.process not in together]
        return [replace(ends[0], with_signal=together), *left]
    if ends and ends[0].process in unordered:
        ends[0] = replace(ends[0], alongside=_find_alongside(unordered.pop(ends[0].process), unordered.values()))
    return ends


def _find_unrecorded(at: At, since_ns: int, printed: PrintedEnds, ends: Sequence[RankEnd]) -> list[RankEnd]:
    """Return the end of a process that wrote no tables, if the others ended because of it.

    Its launcher printed after a time that it failed first.
    """
    if not ends or not all(end.is_consequence for end in ends):
        return []
    recorded = {
        (source.host, source.pid) for sources in at.sources.values() for source in sources if source.rank is not None
    }
    for event in at.events_of(RankFound):
        report = next((one for one in printed.reports if one.is_first and one.pid == event.pid), None)
        if event.rank is None or event.process_key in recorded:
            continue
        if report is not None and report.time_ns >= since_ns:
            return [RankEnd(RankProcess(*event.process_key, event.rank), report, None)]
    return []


def _find_with_signal(first: RankEnd, others: Iterable[RankEnd], ended: Sequence[_Ended]) -> tuple[RankProcess, ...]:
    """Return the others that a signal ended in the same look as the first, but not their launcher, which would say so."""
    looks = {one.process: one.exit_ns for one in ended}
    together = [
        other.process
        for other in others
        if first.report is not None
        and other.report is not None
        and first.report.names_killed
        and other.signal_number == first.signal_number
        and first.signal_number in _LAUNCHER_SIGNALS
        and not (other.launcher or other.traceback or first.traceback)
        and looks[other.process] == looks[first.process] is not None
    ]
    return tuple(sorted(together, key=lambda process: process.rank))


def _find_alongside(first: _Ended, others: Iterable[_Ended]) -> tuple[RankProcess, ...]:
    """Return the others that ended in the same look as the first: neither a time nor their records tell the order."""
    together = [
        other.process
        for other in others
        if first.exit_ns is not None
        and other.exit_ns is not None
        and abs(other.exit_ns - first.exit_ns) <= ONE_LOOK_NS
        and abs(other.last_record_ns - first.last_record_ns) <= _OUTLIVED_NS
    ]
    return tuple(sorted(together, key=lambda process: process.rank))


@dataclass(slots=True)
class _Ended:
    """A process that may have ended, with its launcher's report."""

    process: RankProcess
    local_rank: int | None
    created_ns: int
    exit_ns: int | None
    last_record_ns: int  # the rank that died first has got least far
    has_vanished: bool
    report: LauncherReport | None
    seen_code: int | None

    def find_traceback(self, printed: PrintedEnds, ended_ns: int, *, with_unmarked: bool) -> Traceback | None:
        """Return the exception that ended it, see PrintedEnds."""
        since_ns = max(self.created_ns, ended_ns - _LAST_WORDS_NS)
        return printed.find_traceback(self.process, self.local_rank, since_ns, with_unmarked=with_unmarked)


def _read_end(at: At, source: Source, exit_ns: int | None, printed: PrintedEnds) -> _Ended:
    process = identify_process(source)
    local_rank = _read_local_rank(at, process)
    has_vanished = _has_vanished(at, process, source.created_ns)
    report = printed.find_report(process, local_rank, source.created_ns)
    last_record_ns = _find_last_record(at, source)
    gone = [one for one in at.events_of(RankGone) if one.process_key == process[:2] and one.unix_ns >= source.created_ns]
    seen_code = next((one.exit_code for one in gone), None)
    return _Ended(process, local_rank, source.created_ns, exit_ns, last_record_ns, has_vanished, report, seen_code)


def _left_before(at: At, one: _Ended, job: ProcessExit, printed: PrintedEnds) -> bool:
    """Return whether a rank said goodbye and was gone before a signal ended its launcher, and was not interrupted."""
    if one.has_vanished or not job.signal or any(one.created_ns <= time_ns for time_ns in printed.interrupts_ns):
        return False
    gone = [event.unix_ns for event in at.events_of(RankGone) if event.process_key == one.process[:2]]
    return any(one.created_ns <= time_ns < job.unix_ns - _ONE_END_NS for time_ns in gone)


def _find_last_record(at: At, source: Source) -> int:
    tables = [at.find_sibling(name, source) for name in ("begins", "spans")]
    times = [int(one.unix_times(one.until(at.cursor_ns)[-1:]).max(initial=0)) for one in tables if one is not None]
    return max(times, default=0)


def _merge_looks(ended: Sequence[_Ended]) -> None:
    """Set the same time for all ranks of a node whose processes the sampler found gone in the same look."""
    look_ns: dict[str, int] = {}
    exits = [(one.exit_ns, one) for one in ended if one.exit_ns is not None and one.has_vanished]
    for exit_ns, one in sorted(exits, key=lambda item: item[0]):
        host = one.process.host
        if exit_ns > look_ns.get(host, -inf) + ONE_LOOK_NS:
            look_ns[host] = exit_ns
        one.exit_ns = look_ns[host]


def _assign_unnamed(ended: Sequence[_Ended], printed: PrintedEnds) -> None:
    """Give reports that name no rank to the ranks that they fit best.

    A signal ends a rank without a word, an exit code follows an exception; else the rank that ended first it is.
    """
    for report in printed.reports:
        if report.is_unnamed:
            possible = [one for one in ended if one.report is None and one.created_ns <= report.time_ns]
            fits = partial(_measure_misfit, report=report, printed=printed)
            for one in sorted(possible, key=fits)[:1]:
                one.report = report


def _measure_misfit(one: _Ended, report: LauncherReport, printed: PrintedEnds) -> tuple[bool, bool, bool, float, int]:
    traceback = one.find_traceback(printed, report.time_ns, with_unmarked=False)
    has_raised = traceback is not None and not traceback.is_lost_peer
    is_alike = traceback is None if report.exit_code < 0 else has_raised
    is_other = one.seen_code not in (None, report.exit_code) or one.process.pid in printed.launchers
    return one.exit_ns is None or is_other, not is_alike, not one.has_vanished, one.exit_ns or inf, one.last_record_ns


def _read_local_rank(at: At, process: RankProcess) -> int | None:
    hello = at.process_events(Hello, process)
    return hello[-1].local_rank if hello else None


def read_job_end(at: At, job: ProcessExit) -> LauncherReport | None:
    """Return the end of the only rank of a job, which is also that of its command; None where that is not known."""
    # A code of 128 and more may be the rank's own, or that of a shell.
    is_open = not job.signal and job.exit_code is not None and find_signal_name(job.exit_code) is not None
    number = _SIGNAL_NUMBERS.get(job.signal_name or "")
    code = job.exit_code if is_open or number is None else -number
    pid = next((event.pid for event in at.events_of(JobStarted)[-1:]), None)
    return LauncherReport("", job.unix_ns, code, is_first=True, pid=pid) if code is not None else None


def _has_vanished(at: At, process: RankProcess, since_ns: int) -> bool:
    """Return whether a process ended without a goodbye."""
    if any(event.unix_ns >= since_ns for event in at.process_events(Goodbye, process)):
        return False
    gone = at.events_of(RankGone)
    key = process.host, process.pid
    if not any(event.process_key == key and event.unix_ns >= since_ns for event in gone):
        return False
    return not is_ray_worker(at, process) or any(map(_is_failure, at.events_of(JobEnded)))


def is_ray_worker(at: At, process: RankProcess) -> bool:
    """Whether a rank is a worker of Ray, which ends without a goodbye, and is ended while the driver goes on."""
    hello = at.process_events(Hello, process)
    return any(PurePath(one).parts[-3:] == _RAY_WORKER for event in hello[-1:] for one in (event.arguments or ())[:1])


def _is_failure(end: JobEnded) -> bool:
    return bool(end.exit_code or end.signal or end.oom_kills)


def find_last_exception(at: At) -> Traceback | None:
    """Return the last exception that a job printed before any of its ranks was known; None without any."""
    tracebacks = [one for one in read_printed_ends(at).tracebacks if not one.thread]
    return tracebacks[-1] if tracebacks else None


def find_output_file(at: At, process: RankProcess) -> str | None:
    """Return the file with the last output of a rank; None if it wrote to no file, as far as known."""
    noted = [event for event in at.events_of(OutputFiles) if event.process_key == (process.host, process.pid)]
    return noted[-1].stderr or noted[-1].stdout if noted else None
