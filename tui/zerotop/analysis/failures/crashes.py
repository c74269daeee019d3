"""Ends of ranks by a signal, an error of their own or a shortage, and of jobs of which no rank is known."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

from zerotop.analysis.code_line import read_line
from zerotop.analysis.failures import end_causes
from zerotop.analysis.failures.attempts import Attempt
from zerotop.analysis.failures.end import ERROR, SIGNAL, End, build_host_figures
from zerotop.analysis.failures.last_moments import (
    describe_failed_place,
    has_worked_after,
    read_last_place,
    read_last_seconds,
)
from zerotop.analysis.failures.out_of_memory import explain_kill
from zerotop.analysis.failures.rank_ends import (
    RankEnd,
    find_last_exception,
    find_output_file,
    read_job_end,
    read_printed_ends,
)
from zerotop.analysis.failures.senders import Reason, find_senders
from zerotop.analysis.failures.tracebacks import Traceback
from zerotop.analysis.formatting import Text, format_ranks
from zerotop.analysis.hardware.gpu_faults import explain_by_fault
from zerotop.analysis.script_terms import read_terms
from zerotop.recording.keys import RankProcess, identify_process
from zerotop.recording.moments.at import At, RankAt
from zerotop.recording.moments.host_memory import HostMemory
from zerotop.recording.moments.process_exits import ProcessExit, count_oom_kills, find_first_exit, find_signal_name
from zerotop.recording.output.tail import read_last_lines
from zerotop.recording.steps.step_memory import measure_held_bytes
from zerotop_probe.recording.events import ExitCall, Goodbye, Hello, JobEnded, JobStarted, Left, RankGone
from zerotop_probe.recording.tables import FAILED

_TAIL = 256
LAST_MEMORY_NS = 60 * 10**9
"""A rank that dies of a lack of memory ends within this time after it."""
LAUNCHER_NS = 5 * 10**9
"""Within this time after a rank's end, launchers print how it ended."""
# The kernel's kills are counted from this long before a rank is found gone.
_KILLED_NS = 3 * 10**9
COUNTED_NS = 200_000_000
"""A rank that was not sampled for this long had ended: later counts of kills have its own."""
# Host memory that a killed rank took after its last step is worth a sentence from this size on.
_GROWN_BYTES = 256 << 20
# Launchers and schedulers stop ranks with these.
_STOPS = (signal.SIGTERM, signal.SIGKILL)
_FILE = "[ Its last output is in {file}.]"
_GLOO_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (?P<received>\d+) vs (?P<expected>\d+)")


# --- a rank --------------------------------------------------------------------------------------------------------------


def explain_rank(at: At, ends: Sequence[RankEnd], processes: Sequence[RankProcess], job: ProcessExit | None = None) -> End:
    """Return the end of the rank that failed first.

    Args:
        ends: how ranks ended, the first failure first.
        processes: the ranks of its attempt.
        job: the end of the job as far as known: its signal counts where nothing tells how the rank ended.
    """
    return _Case(at, ends, processes, job).build()


class _Case:
    """The end of a rank, or of several that may have been first, as known at a moment."""

    def __init__(self, at: At, ends: Sequence[RankEnd], processes: Sequence[RankProcess], job: ProcessExit | None) -> None:
        self.at, self.job, self.first, self.processes = at, job, ends[0], processes
        self.ends = ends
        waited = {end.process for end in ends if end.traceback is not None and end.traceback.has_timed_out}
        both = waited if self.first.process in waited else set()
        self.others = sorted(end.process.rank for end in ends[1:] if end.is_consequence and end.process not in both)
        self.who = (self.first.process, *self.first.alongside, *self.first.with_signal)
        self.rank = RankAt(at, self.first.process)
        gone = [event.unix_ns for event in at.events_of(RankGone) if event.process_key == self.first.process[:2]]
        goodbyes = [event.unix_ns for event in self.rank.events_of(Goodbye)]
        self.ended_ns = min([*gone, *goodbyes], default=at.cursor_ns if job is None else job.unix_ns)
        finished = [_count_steps(RankAt(at, process), self.ended_ns) for process in self.who]
        self.finished = finished[0] if len({*finished}) == 1 else None  # steps; None where they differ
        self.file = find_output_file(at, self.first.process) if len(self.who) == 1 else None
        self.early = _find_early_end(at, ends, processes, self.ended_ns)
        self.signal_name = self.first.signal_name
        if self.first.report is None and self.first.seen_code is None and job is not None:
            self.signal_name = job.signal_name

    def build(self) -> End:
        first, (cause, own_values) = self.first, self.choose_cause()
        kind = ERROR if cause.is_error else SIGNAL
        spans, place = read_last_place(self.at, first.process, self.ended_ns)
        if any(read_last_place(self.at, other, self.ended_ns)[1] != place for other in first.alongside):
            place = ""
        what = f"Rank {self.rank.rank} failed{describe_failed_place(spans)}."
        memory: tuple[HostMemory, ...] = ()
        why = _describe_error(first.traceback)
        if kind == SIGNAL:
            what, cause = self.describe_signal(place, cause)
            memory = read_last_seconds(self.at.at(self.ended_ns), self.rank.host)
            why = f"{first.order_sentence} {_describe_host_memory(memory)}".lstrip()
        fault = explain_by_fault(self.at, self.processes, first.ranks, self.ended_ns, self.at.cursor_ns)
        if fault is not None:
            why, cause = f"{fault.sentence} {why}", cause._replace(**fault.change_texts(cause.details))
        evidence = self.measure_evidence()
        values = {**read_terms(self.rank.engine), **evidence, **self.collect_values(), **own_values}
        return End(
            kind=kind,
            ranks=tuple(one.rank for one in self.who),
            unix_ns=self.ended_ns,
            exit_code=self.job.exit_code if self.job is not None else None,
            what=what,
            where=f"on {self.rank.host}" if self.rank.host else "",
            why=why,
            advice=Text(f"{cause.advice}{_FILE}", values),
            numbers=tuple(build_host_figures(memory)),
            spans=spans if not first.alongside else (),
            host_memory=memory,
            last_words=first.traceback.text if first.traceback is not None else "",
            final=kind == ERROR or self.job is None or self.job.is_final,
            cause=cause._replace(details=f"{cause.details}{_FILE}"),
            evidence=evidence,
            values=values,
        )

    def choose_cause(self) -> tuple[end_causes.EndCause, dict[str, Any]]:
        """Return the cause, with values of its own for the templates."""
        if self.early is not None:
            return end_causes.LEFT_ALONE, self.early
        rank = self.rank.rank if self.rank.rank >= 0 else None
        shortage = end_causes.choose_shortage(self.at, self.rank.host, rank, self.first.traceback)
        if shortage is not None and self.first.signal_number is None:
            return shortage
        if (traceback := self.first.traceback) is not None:
            is_assert = "device-side assert" in traceback.message
            asserted = end_causes.find_assertion(self.read_last_texts()) if is_assert else None
            if (found := asserted or end_causes.find_unequal_samples(traceback)) is not None:
                return found
        cause = end_causes.choose_cause(self.first, self.kills, self.scheduler, is_alone=self.is_alone)
        if cause is end_causes.EXITED:
            return self.explain_exit()
        if cause.is_of_memory:
            process, kills = self.first.process, self.kills or 0
            killed = ProcessExit(process.host, self.ended_ns, process.rank, process.pid, self.signal_name, None, kills)
            memory = explain_kill(self.at, killed)
            return cause, {"saving_memory": memory.advice, "saving_memory_fix": memory.fix}
        sizes = self.find_sizes() if cause is end_causes.CRASHED else {}
        return (end_causes.OTHER_SIZE, sizes) if sizes else (cause, {})

    def explain_exit(self) -> tuple[end_causes.EndCause, dict[str, Any]]:
        """Return the call of ``os._exit`` that the rank recorded, else how Python ended, and after which phase."""
        calls = [one for one in self.rank.events_of(ExitCall) if one.exit_code & 0xFF == self.first.exit_code]
        if calls:
            line = read_line(calls[-1])
            places = {"exit_place": line.place, "exit_line": line.text, "exit_location": line.location} if line else {}
            also = sorted(end.process.rank for end in self.ends[1:] if self.at.process_events(ExitCall, end.process))
            return end_causes.EXIT_CALLED, {"exit_status": calls[-1].exit_code, "also": also or None, **places}
        if not self.rank.events_of(Hello) or self.rank.events_of(Left):
            return end_causes.EXITED, {}  # how it ended was not watched
        if self.first.has_left:
            return end_causes.EXITED, {"manner": "Its script had ended, by sys.exit() or an exception without a traceback."}
        place = read_last_place(self.at, self.first.process, self.ended_ns)[1]
        manner = f"It ended{place} by os._exit(), or by compiled code: Python's functions at exit did not run."
        return end_causes.EXITED, {"manner": manner}

    def find_sizes(self) -> dict[str, int]:
        """Return what gloo printed about a tensor of an unexpected size when it ended a process; empty if it did not."""
        found = map(_GLOO_SIZES.search, self.read_last_texts())
        return next(({name: int(size) for name, size in one.groupdict().items()} for one in found if one is not None), {})

    def read_last_texts(self) -> Iterator[str]:
        """Yield the last lines of the job's output before the end, of all nodes."""
        since_ns = self.ended_ns - LAST_MEMORY_NS
        return (line.text for line in chain.from_iterable(read_last_lines(self.at)) if line.time_ns >= since_ns)

    @cached_property
    def is_alone(self) -> bool:
        """Whether the other ranks worked on, or failed later, because the first one had ended."""
        later = {end.process for end in self.ends[1:] if end.launcher or (end.traceback and end.traceback.is_lost_peer)}
        others = [process for process in self.processes if process != self.first.process]
        return bool(others) and all(one in later or has_worked_after(self.at, one, self.ended_ns) for one in others)

    @cached_property
    def kills(self) -> int | None:
        """The processes that the kernel killed for lack of memory around then; None if unknown."""
        begin_ns, until_ns = self.ended_ns - _KILLED_NS, min(self.at.cursor_ns, self.ended_ns + LAUNCHER_NS)
        kills = count_oom_kills(self.at.at(until_ns), self.rank.host, begin_ns)
        seen = self.rank.host_samples.read_window(begin_ns, self.ended_ns).times
        last_ns = int(seen[-1]) + COUNTED_NS if len(seen) else self.ended_ns
        counted_ns = self.at.records("hosts", self.rank.host).read_window(begin_ns, until_ns).times[-1:]
        return kills if kills or (counted_ns >= last_ns).any() else None

    @cached_property
    def scheduler(self) -> str | None:
        """The scheduler that reported too much memory use around then."""
        senders = chain.from_iterable(map(find_senders, read_last_lines(self.at)))
        since_ns = self.ended_ns - LAST_MEMORY_NS
        return next((one.name for one in senders if one.reason is Reason.MEMORY and one.time_ns >= since_ns), None)

    def describe_signal(self, place: str, cause: end_causes.EndCause) -> tuple[str, end_causes.EndCause]:
        """Return a sentence about ranks that did not end by themselves, and the cause, which that may change."""
        first, name = self.first, self.signal_name
        who = f"Rank {self.rank.rank} (PID {self.rank.pid})"
        if first.with_signal:
            who = format_ranks(sorted(one.rank for one in self.who)).capitalize()
        elif first.alongside:
            who = f"{first.who[0].upper()}{first.who[1:]}" if name else format_ranks(first.ranks).capitalize()
        be = "were" if first.with_signal else "was"
        what = f"{be} killed by {name}" if name else "died unexpectedly"
        if not name and read_printed_ends(self.at).stopped_ns is not None:
            whose = "their" if len(first.ranks) > 1 or first.with_signal else "its"
            what, name = f"ended when a signal told {whose} launcher to stop", "SIGTERM"
        stop = end_causes.STOPS.get(name or "") if not self.is_alone else None
        cause = cause._replace(advice=stop.advice, fix=stop.fix) if stop is not None else cause
        return f"{who} {what}{place}.", cause

    def measure_evidence(self) -> dict[str, int | None]:
        first, held = self.first, None
        if not first.alongside and (sample := self.rank.host_samples.read_last(self.ended_ns)) is not None:
            held = int(measure_held_bytes(sample))
        return {
            "finished_steps": self.finished,
            "host_held_bytes": held,
            "grown_bytes": _measure_growth(self.rank, self.ended_ns) if held is not None else None,
            "oom_kills": self.kills or None,
            "signal_number": first.signal_number,
            "exit_code": first.exit_code,
            "exit_ns": max(0, self.ended_ns - first.traceback.time_ns) if first.traceback is not None else None,
        }

    def collect_values(self) -> dict[str, Any]:
        first, pids = self.first, " or ".join(str(one.pid) for one in self.who)
        return {
            "rank": self.rank.rank,
            "pid": pids,
            "ended": f"{first.who[0].upper()}{first.who[1:]}",
            "dead": format_ranks(first.ranks).capitalize() if first.alongside else f"Rank {self.rank.rank}'s process {pids}",
            "together": first.order_sentence or None,
            "steps": self.finished or None,
            "early": " before its first step was finished" if self.finished == 0 else "",
            "others": self.others or None,
            "launcher": first.report.launcher or None if first.report is not None else None,
            "code": first.exit_code,
            "meant": find_signal_name(first.exit_code or 0),
            "signalled": sorted(one.rank for one in self.who),
            "alone": f"rank {self.rank.rank}" if self.is_alone and first.signal_number in _STOPS else None,
            "number": first.signal_number,
            "signal": first.signal_name,
            "scheduler": self.scheduler,
            "file": self.file,
            **(first.traceback.describe() if first.traceback is not None else {}),
        }


def _count_steps(rank: RankAt, until_ns: int) -> int:
    steps = rank.steps.clip_window(0, until_ns).rows["step"]
    return int(steps[-1]) + 1 if len(steps) else 0


def _measure_growth(rank: RankAt, ended_ns: int) -> int | None:
    """Return the growth of its host memory after its last step; None if it was small."""
    steps, last = rank.steps.clip_window(0, ended_ns), rank.host_samples.read_last(ended_ns)
    before = rank.host_samples.read_last(int(steps.times[-1])) if len(steps) else None
    grown = int(measure_held_bytes(last) - measure_held_bytes(before)) if before is not None else 0
    return grown if grown >= _GROWN_BYTES else None


def _find_early_end(
    at: At, ends: Sequence[RankEnd], processes: Sequence[RankProcess], ended_ns: int
) -> dict[str, Any] | None:
    """Return the rank whose normal end cost the first of some ranks its connection; None if there was none."""
    end, raised = ends[0], {one.process for one in ends if one.traceback is not None}
    if end.traceback is None or not end.traceback.is_lost_peer:
        return None
    for other in (process for process in processes if process not in raised):
        left = [event for event in at.process_events(Goodbye, other) if event.unix_ns < ended_ns]
        finished = _count_steps(RankAt(at, other), ended_ns) if left and other.rank != end.process.rank else 0
        if finished:
            return {"early_rank": other.rank, "early_steps": finished}
    return None


def _describe_error(traceback: Traceback | None) -> str:
    if traceback is None:
        return "Its output names no exception."
    return f"{traceback.text.rstrip('.')}{f', at {traceback.place}' if traceback.place else ''}."


def _describe_host_memory(memory: Sequence[HostMemory]) -> str:
    shares = [sample.used_bytes / sample.limit_bytes for sample in memory if sample.limit_bytes]
    if not shares:
        return "The node's memory was not sampled in its last seconds."
    return f"Host memory was fine: {max(shares) * 100:.0f} % in use in the last seconds."


# --- an attempt, a job ---------------------------------------------------------------------------------------------------


def explain_attempt(at: At, attempt: Attempt, end: RankEnd) -> End:
    """Return the end of a job whose last attempt ended before it trained."""
    told = explain_rank(at, [end], attempt.processes, find_first_exit(at))
    what = f"Rank {end.process.rank} failed in attempt {attempt.number} before its first step."
    why = told.why if told.last_words else f"It ended with {attempt.cause}."
    return replace(told, kind=ERROR, what=what, why=why, unix_ns=attempt.known_ns)


def explain_job(at: At, job: ProcessExit) -> End:
    """Return the end of a job whose ranks nobody saw end: that of its command, or of a rank that an exception left."""
    traceback = find_last_exception(at)
    if job.rank is not None and job.pid is not None:
        vanished = RankProcess(job.host, job.pid, job.rank)
        code = next((one.exit_code for one in at.events_of(RankGone) if one.process_key == vanished[:2]), None)
        return explain_rank(at, [RankEnd(vanished, None, None, code)], [vanished], job)
    if job.signal_name is None and (failed := _find_first_failed(at)) is not None:
        return explain_rank(at, [RankEnd(failed, read_job_end(at, job), traceback)], [failed], job)
    end, ended = RankEnd(RankProcess(job.host, 0, -1), read_job_end(at, job), traceback), at.events_of(JobEnded)
    told = explain_rank(at, [end], [identify_process(source) for source in at.sources["spans"]], job)
    words = ended[-1].text.rstrip(".") if ended and ended[-1].text else f"The job failed with exit code {job.exit_code}"
    ranks = (traceback.rank,) if traceback is not None and traceback.rank is not None else ()
    return replace(
        told,
        ranks=ranks,
        what=f"The job was killed by {job.signal_name}." if job.signal_name else f"{words}.",
        unix_ns=traceback.time_ns if traceback is not None else job.unix_ns,
        evidence={"exit_code": job.exit_code},
        values={**told.values, "rank": next(iter(ranks), None), "step": None, "ended": "The job", "pid": _find_pid(at)},
    )


def _find_pid(at: At) -> int | None:
    """Return the pid of the job's command."""
    return next((event.pid for event in at.events_of(JobStarted)), None)


def _find_first_failed(at: At) -> RankProcess | None:
    """Return the rank whose last phase was the first to end by an exception."""
    failures: list[tuple[int, RankProcess]] = []
    for source in at.sources["spans"]:
        tail = source.until(at.cursor_ns)[-_TAIL:]
        failed = tail[tail["flags"] & FAILED != 0]
        if len(failed) and failed["end_ns"][-1] == tail["end_ns"].max():
            failures.append((int(failed["end_ns"][-1]) + source.offset_ns, identify_process(source)))
    return min(failures)[1] if failures else None
