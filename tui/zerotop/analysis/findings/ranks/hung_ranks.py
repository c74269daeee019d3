"""No phase begins or ends on any rank for far longer than an iteration takes: one rank hangs, and the others wait for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from zerotop.analysis.code_line import CodeLine
from zerotop.analysis.failures.rank_ends import read_printed_ends
from zerotop.analysis.failures.tracebacks import Traceback
from zerotop.analysis.findings.support import Finding, FindingKind, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.causes.loader_causes import find_own_worker_line
from zerotop.analysis.findings.support.evidence import Evidence, Group, Ints, Process, Samples
from zerotop.analysis.findings.support.gpu_faults import change_by_fault
from zerotop.analysis.findings.support.links import (
    TO_GPU_FAULTS,
    Kinds,
    awaits_dead_thread,
    is_held_up,
    is_told_again,
    nvml_is_silent,
    was_the_end,
)
from zerotop.analysis.findings.support.thresholds import BUSY_CORES
from zerotop.analysis.formatting import Text
from zerotop.analysis.hangs.reader import StandstillReader
from zerotop.analysis.hangs.reading import find_reading, list_training
from zerotop.analysis.hangs.sentences import (
    ALL_STACKS,
    describe_collectives,
    describe_departure,
    describe_group,
    describe_odd,
    describe_reads,
    describe_threads,
    name_thread,
    put_in_past,
    write_advice,
)
from zerotop.analysis.hangs.standstill import StackGroup, Standstill
from zerotop.analysis.hangs.waits import LONG_WORK, WaitKind
from zerotop.analysis.processes.thread_kinds import read_thread_kinds
from zerotop.analysis.stats.change_points import SETTLED_STEPS
from zerotop.recording.events.event_files import select_events
from zerotop.recording.keys import RankProcess, identify_process
from zerotop_probe.recording.event_values import BETWEEN_PHASES
from zerotop_probe.recording.events import Goodbye, JobEnded, Left, RankGone, RankStopped, RecordsLost, StopSent
from zerotop_probe.recording.tables import COUNTED, PHASES

_KIND = FindingKind(
    name="hung_ranks",
    severity=Severity.ERROR,
    confidence=0.6,
    headline="No progress for {silent_s:seconds}[: rank {hung_rank} is behind, {phase}]",
    details=(
        "No phase began or ended on any rank; the last iterations before took {iteration_s:seconds} (median)"
        "[. Rank {hung_rank} is {phase}, {others}]."
    ),
    advice="Find the line at which {hung} is stuck.",
    fix="py-spy dump --pid {pid}",
    explained_by=(
        *TO_GPU_FAULTS,
        Kinds(nvml_is_silent, "nvml_silent"),
        Kinds(is_held_up, "dead_rank", "runs_after_error", "runs_after_end"),
        Kinds(awaits_dead_thread, "thread_died"),
    ),
    superseded_by=(
        *(Kinds(is_told_again, "hung_ranks", shares_ranks=shares_ranks) for shares_ranks in (True, False)),
        *(Kinds(was_the_end, "long_end", shares_ranks=shares_ranks) for shares_ranks in (True, False)),
    ),
)
_SEEN = _KIND.with_changes(
    confidence=0.9,
    headline="No progress for {silent_s:seconds}: {odd}",
    details=(
        "[{departure} ][{groups} ][py-spy shows a worker of the loader at {worker}. ][{untrained} ][{threads} ]"
        "[{collectives} ]"
        "{silence}; the last iterations before took {iteration_s:seconds} (median)."
    ),
    advice=f"{{advice}} {ALL_STACKS}",
    fix="[{line}]",
)
_AT_END = _SEEN.with_changes(confidence=0.7, headline="No progress for {silent_s:seconds} before the end: {odd}")
# A silence is a hang after this many times the longest of the last iterations, and at least these seconds: if the stacks of
# all ranks show that they wait, and without stacks.
HANG_ITERATIONS = 10.0
SEEN_SECONDS = 10.0
HANG_SECONDS = 30.0
# The same where the job was ended meanwhile: of it no more will be known.
ENDED_ITERATIONS, ENDED_SECONDS = 3.0, 5.0
# A GPU hangs if it works for this long and nothing is allocated on it.
DEVICE_SECONDS = 15.0
# Saving, loading, compiling and computing count as a hang after this long.
LONGEST_WORK_SECONDS = 600.0
_OF_WORKER = "Look at the worker's line: the loader waits for its batch."
_NO_PHASE, _NOT_TRAINED = "No phase began or ended on any rank", "No rank trained"
# Longest text in the headline beside the duration.
_ODD_WIDTH = 80 - len("No progress for 600 s: ")
_ENDED_WIDTH = _ODD_WIDTH - len(" before the end")

# Phases that may take long without a sign of life.
_SILENT_PHASES = ("init", "checkpoint_save", "checkpoint_load")
# A rank that has called a collective does not work while it waits there for other ranks, even if it uses a core.
_IN_COLLECTIVES = (WaitKind.COLLECTIVE, WaitKind.BACKWARD)
# Collectives at which ranks wait for one that does something else for long.
_BARRIERS = ("barrier", "monitored_barrier")
# A rank that has read the micro-batches of so many steps may only read slowly: some loops read all of a step at once.
_READ_STEPS = 2
# In a counted step phases are not recorded.
_UNKNOWN_PHASE = "an unknown phase"
# Events of a rank that ends, and of one whose probe is removed.
_LAST_EVENTS = (Goodbye, Left)
# A silence that lasted so much longer to the end of the job is told again.
_LONGER_NS = 10**9
# Records of other ranks and nodes may be read this much later.
_LATE_NS = 3 * 10**9
# A phase in progress began at most this long before the last sign of life.
_LOOK_BACK_NS = 3600 * 10**9


class _Last(NamedTuple):
    """The last phase that a process has begun, and when (unix nanoseconds)."""

    begin_ns: int
    phase: str


@dataclass(frozen=True)
class _Silence:
    """A period in which no phase began or ended on any rank of an attempt, or none but reading data on some ranks."""

    since_ns: int
    until_ns: int  # the next sign of life, or the cursor
    usual_s: float  # of the iterations before
    longest_s: float
    readers: tuple[RankProcess, ...] = ()  # ranks that read batches all the time, while the others did nothing

    def limit_ns(self, seconds: float, iterations: float = HANG_ITERATIONS) -> int:
        """Return when the silence has lasted ``seconds``, or longer if iterations are long."""
        return self.since_ns + int(max(seconds, iterations * self.longest_s) * 1e9)


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report each silence of an attempt when it has lasted long enough, even if it ends later.

    One that was reported without stacks is told again with them, and each with its end once the job has gone on.
    """
    silences = _find_silences(window) if len(window.subject.lead.steps) else ()
    told = (one for silence in silences for one in _check_silence(window, silence) if one is not None)
    yield from window.follow(told, partial(_tell_end, window))


def _tell_end(window: SearchWindow[Group], told: Finding) -> Finding | None:
    """Return a silence that was told, with its length, once a step, the job or the recording has ended; else None."""
    group, steps = window.subject, window.subject.lead.steps
    later = steps[np.searchsorted(steps["end_unix_ns"], told.known_ns, "right") :][:1]
    seen = window.find_once(lambda: None, told.begin_ns)
    is_last = seen is None or seen.known_ns <= told.known_ns  # the same was not told again with stacks
    if told.severity is not Severity.ERROR or not is_last:
        return None
    if not isinstance(told.headline, Text) or not isinstance(told.details, Text):
        return None
    if not len(later):
        whole = window.recording.recording
        recorded_ns = int(np.iinfo(np.int64).max) if whole.is_live else whole.last_written_ns
        end_ns = _find_stop(window.recording, group, told.known_ns) or min(_find_end(window.recording, group), recorded_ns)
        if not told.known_ns + _LONGER_NS <= end_ns <= window.recording.cursor_ns:
            return None
        evidence = told.evidence | {"silent_s": (end_ns - told.begin_ns) / 1e9}
        headline, details = (_tell_in_past(text, evidence) for text in (told.headline, told.details))
        return replace(told, known_ns=end_ns, end_ns=end_ns, headline=headline, details=details, evidence=evidence)
    known_ns, step = int(later["end_unix_ns"][0]), int(later["step"][0])
    parts = [
        process.records(table).read_window(told.known_ns, known_ns)
        for process in group.processes
        for table in ("begins", "spans")
    ]
    signs = [list_training(part) if told.evidence.get("reads") else part.times for part in parts]
    until_ns = min((int(times[0]) for times in signs if len(times)), default=known_ns)
    evidence = told.evidence | {"silent_s": (until_ns - told.begin_ns) / 1e9}
    details = _tell_in_past(told.details, evidence)
    return replace(
        told,
        known_ns=known_ns,
        end_ns=until_ns,
        severity=Severity.WARNING,
        headline=_tell_in_past(told.headline, evidence),
        details=Text(f"{details.template} It went on in step {{went_on}}.", {**details.values, "went_on": step}),
        evidence=evidence,
    ).for_next_run


def _tell_in_past(told: str, evidence: Mapping[str, float]) -> Text:
    """Return a sentence about a silence that is over, with its length."""
    text = told if isinstance(told, Text) else Text(told, {})
    values = {name: put_in_past(value) if isinstance(value, str) else value for name, value in text.values.items()}
    return Text(put_in_past(text.template), {**values, **evidence})


def _find_silences(window: SearchWindow[Group]) -> Iterator[_Silence]:
    """Yield the silences that ended since the last search, and the one in progress."""
    group = window.subject
    fresh = [window.records(process.records(table)) for process in group.processes for table in ("begins", "spans")]
    for since_ns, until_ns in _list_gaps(window, [part.times for part in fresh], "signs"):
        yield from _measure_silence(group, since_ns, until_ns, ())
    for since_ns, until_ns in _list_gaps(window, [list_training(part) for part in fresh], "training"):
        begins, spans = (
            [process.records(table).read_window(since_ns, until_ns - 1) for process in group.processes]
            for table in ("begins", "spans")
        )
        reading = find_reading(begins, spans, since_ns, min(until_ns, _find_end(window.recording, group)))
        if reading is not None:
            readers = tuple(identify_process(group.processes[index].source) for index in reading.readers)
            yield from _measure_silence(group, reading.since_ns, until_ns, readers)


def _list_gaps(window: SearchWindow[Group], fresh: Sequence[Ints], of: str) -> list[tuple[int, int]]:
    """Return the long gaps between signs of life that ended since the last search, and the one in progress."""
    first_ns = int(window.subject.lead.steps["end_unix_ns"][0])
    times = np.sort(np.concatenate(fresh), kind="stable")  # nearly in order
    last_ns: list[int] = window.keep(list, of)  # of a sign of life before those: a silence may have begun long ago
    heard = np.concatenate([last_ns or [first_ns], times[times >= (last_ns or [first_ns])[0]]])
    last_ns[:] = [int(heard[-1])]
    ends = np.append(heard[1:], window.recording.cursor_ns)
    least_s = np.full(len(ends), SEEN_SECONDS)
    least_s[-1] = ENDED_SECONDS
    return [(int(heard[index]), int(ends[index])) for index in np.flatnonzero(ends - heard >= least_s * 1e9)]


def _measure_silence(group: Group, since_ns: int, until_ns: int, readers: tuple[RankProcess, ...]) -> Iterator[_Silence]:
    times = group.lead.steps_until(since_ns)["iteration_s"]
    if len(times):
        before = times[min(len(times) - 1, SETTLED_STEPS) :][-20:]  # the first ones load and compile
        yield _Silence(since_ns, until_ns, float(np.median(before)), float(before.max()), readers)


def _check_silence(window: SearchWindow[Group], silence: _Silence) -> Iterator[Finding | None]:
    """Find a silence at the first time, of those at which ranks have written stacks, that shows it."""
    recording, group, since_ns = window.recording, window.subject, silence.since_ns
    last = [_find_last(process, since_ns) for process in group.processes]
    is_seen = window.find_once(lambda: None, since_ns) is not None
    if is_seen or any(one.phase in _SILENT_PHASES for one in last):
        return
    end_ns = min(silence.until_ns, _find_end(recording, group))
    sources = [process.source for process in group.processes]
    reader = StandstillReader(recording.recording, sources, since_ns, end_ns, silence.readers)
    times = _list_times(silence, reader.written_ns, end_ns)
    settled = [time_ns for time_ns in times if time_ns < recording.cursor_ns - _LATE_NS]
    for known_ns in [*window.items(settled, since_ns), *times[len(settled) :]]:
        if is_explained(recording, group, since_ns, known_ns):
            return
        seen = window.find_once(partial(_find_seen, window, reader, silence, known_ns), since_ns)
        if seen is not None:
            yield seen
            return
        if known_ns >= silence.limit_ns(HANG_SECONDS) and not any(time_ns <= known_ns for time_ns in reader.written_ns):
            yield window.find_once(partial(_build_unseen, recording, group, last, silence, known_ns), (since_ns, _KIND))
    stopped_ns = _find_stop(recording, group, since_ns)
    if (
        stopped_ns is not None
        and stopped_ns <= silence.until_ns
        and not is_explained(recording, group, since_ns, stopped_ns)
    ):
        yield window.find_once(partial(_find_ended, window, reader, silence, stopped_ns), since_ns)


def _find_seen(window: SearchWindow[Group], reader: StandstillReader, silence: _Silence, known_ns: int) -> Finding | None:
    """Return the finding if the stacks of all ranks show by then that they hang."""
    is_long = known_ns >= silence.limit_ns(LONGEST_WORK_SECONDS)
    standstill = reader.read_at(known_ns, confirmed=not is_long)
    if silence.readers and known_ns < silence.limit_ns(HANG_SECONDS):  # it may only read for long what it skips
        return None
    if standstill is None or not (is_long or is_hang(window.subject, standstill, silence.since_ns, known_ns)):
        return None
    return _build_seen(window.recording, window.subject, silence, known_ns, standstill)


def _find_ended(window: SearchWindow[Group], reader: StandstillReader, silence: _Silence, stopped_ns: int) -> Finding | None:
    """Return the finding if the job was ended while its ranks waited, for each other or idly."""
    standstill = reader.read_at(stopped_ns - 1, confirmed=False)
    if standstill is None or stopped_ns < silence.limit_ns(ENDED_SECONDS, ENDED_ITERATIONS):
        return None
    late = standstill.odd or standstill.groups[0]
    is_idle = late.wait is not None and late.wait.kind in (WaitKind.SLEEP, WaitKind.LOCK)
    is_known = all(group.stacks or group.reads for group in standstill.groups)
    if not is_known or not (is_idle or late.reads or standstill.departure is not None or standstill.is_mismatch):
        return None
    if not is_hang(window.subject, standstill, silence.since_ns, stopped_ns):
        return None
    found = _build_seen(window.recording, window.subject, silence, stopped_ns, standstill, is_over=True)
    headline, details = (_tell_in_past(text, found.evidence) for text in (found.headline, found.details))
    return replace(found, headline=headline, details=details)


def _find_last(process: Process, since_ns: int) -> _Last:
    """Return the phase that a process has begun last."""
    begins = process.records("begins").read_window(since_ns - _LOOK_BACK_NS, since_ns)
    spans = process.records("spans").read_window(since_ns - _LOOK_BACK_NS, since_ns)
    begin_ns = int(begins.times[-1]) if len(begins) else 0
    if len(spans) and len(begins) and spans.rows["phase"][-1] == begins.rows["phase"][-1] and spans.times[-1] > begin_ns:
        return _Last(int(spans.times[-1]), BETWEEN_PHASES)
    if len(spans) and spans.rows["flags"][-1] & COUNTED and spans.times[-1] >= begin_ns:
        return _Last(int(spans.times[-1]), _UNKNOWN_PHASE)
    return _Last(begin_ns, _name_phase(begins))


def _list_times(silence: _Silence, written_ns: list[int], end_ns: int) -> list[int]:
    """Return the times at which a silence is examined: when ranks wrote stacks, at the limits, and after long work."""
    first_ns = silence.limit_ns(SEEN_SECONDS)
    limits = first_ns, silence.limit_ns(HANG_SECONDS), silence.limit_ns(LONGEST_WORK_SECONDS)
    return sorted(time_ns for time_ns in {*limits, *written_ns} if first_ns <= time_ns <= end_ns)


def is_hang(group: Group, standstill: Standstill, since_ns: int, time_ns: int) -> bool:
    """Whether the ranks wait in different collectives, or those that others wait for are stuck, not doing long work."""
    groups = standstill.groups
    if standstill.difference is not None:
        return True
    if any(one.reads for one in groups):  # at a barrier ranks wait for one that evaluates, too
        least = _READ_STEPS * (group.engine.gradient_accumulation or 1)
        return all(one.reads > least if one.reads else one.awaits_others and one.activity not in _BARRIERS for one in groups)
    late = [standstill.odd] if standstill.odd is not None else [one for one in groups if not one.awaits_others]
    if not late and all(one.awaits_device for one in groups):
        late = list(groups)
    if any(one.awaits_others for one in groups) and any(one.has_left for one in late):
        # A rank whose script is over does not come, but the others may wait for one that still works.
        late = [one for one in groups if not one.awaits_others and not one.has_left]
    return not any(_is_working(group, stacks, since_ns, time_ns) for stacks in late)


def _is_working(group: Group, stacks: StackGroup, since_ns: int, time_ns: int) -> bool:
    if stacks.wait is None or (stacks.pending is not None and stacks.wait.kind in _IN_COLLECTIVES):
        return False
    if stacks.awaits_device:  # a thread that waits for its GPU may use a core for that
        return not (stacks.is_device_still and time_ns >= since_ns + DEVICE_SECONDS * 1e9)
    if stacks.wait.kind is WaitKind.DEVICE and stacks.pending is not None:  # on its GPU a collective waits for other ranks
        return False
    return stacks.wait.kind in LONG_WORK or any(
        _is_busy(process, since_ns, time_ns) for process in group.processes if process.rank in stacks.ranks
    )


def _is_busy(process: Process, since_ns: int, time_ns: int) -> bool:
    rows = process.host_samples.read_window(since_ns, time_ns).rows
    # If others take the cores, a rank that computes waits for one. NaN on kernels that do not measure it.
    wanted = rows["cores_used"] + np.nan_to_num(rows["waiting_cores"])
    return len(rows) > 0 and float(wanted.mean()) - _measure_own(process, since_ns, time_ns) >= BUSY_CORES


def _measure_own(process: Process, since_ns: int, time_ns: int) -> float:
    """Return how many cores the probe's threads used or waited for: they look again and again for a lock that is kept."""
    host, pid = process.source.host, process.source.pid
    rows = process.at.records("threads", host, "pid", pid).read_window(since_ns, time_ns).rows
    wanted = 0.0
    for tid in read_thread_kinds(process.at, host, pid).own:
        own = rows[rows["tid"] == tid]
        if len(own) > 1:
            passed = own[[0, -1]][["time_ns", "cpu_ns", "wait_ns"]].tolist()
            (begin_ns, *begin), (end_ns, *end) = passed
            wanted += (sum(end) - sum(begin)) / max(1, end_ns - begin_ns)
    return wanted


def is_explained(recording: Evidence, group: Group, since_ns: int, until_ns: int) -> bool:
    """Whether a rank could not write its phases, for example to a full disk, or was stopped by a signal."""
    keys = {process.key for process in group.processes}
    stopped = select_events(recording.events_of(RankStopped), since_ns, until_ns)
    return any(event.process_key in keys for event in stopped) or any(
        select_events(process.events_of(RecordsLost), since_ns, until_ns) for process in group.processes
    )


def _find_end(recording: Evidence, group: Group) -> int:
    """Return when the first rank ended normally, or the last rank or the job ended or stopped reporting."""
    created_ns = group.lead.source.created_ns
    ends = [event.unix_ns for event in recording.events_of(JobEnded) if event.unix_ns > created_ns]
    gone_ns = {event.process_key: event.unix_ns for event in recording.events_of(RankGone)}
    if all(process.key in gone_ns for process in group.processes):
        ends.append(max(gone_ns[process.key] for process in group.processes))
    ends += [
        event.unix_ns
        for process in group.processes
        for kind in _LAST_EVENTS
        for event in process.events_of(kind)
        if event.unix_ns > process.source.created_ns
    ]
    return min(ends, default=int(np.iinfo(np.int64).max))


def _find_stop(recording: Evidence, group: Group, since_ns: int) -> int | None:
    """Return when the job was stopped or ended after a time; None if it goes on, or if a rank has ended by itself before."""
    ends = [*recording.events_of(StopSent), *recording.events_of(JobEnded)]
    ends += [event for event in recording.events_of(RankGone) if event.process_key in {one.key for one in group.processes}]
    left = [event for process in group.processes for kind in _LAST_EVENTS for event in process.events_of(kind)]
    left_ns = [event.unix_ns for event in left if event.unix_ns > group.lead.source.created_ns]
    times = [event.unix_ns for event in ends]
    if left_ns:  # Python ends in an orderly way after SIGINT too
        # What is printed is read later: Python prints its traceback before it says goodbye.
        first_ns = min(left_ns)
        times += [first_ns if first_ns <= one <= first_ns + _LATE_NS else one for one in list_interrupts(recording)]
    stopped_ns = min((time_ns for time_ns in times if time_ns > since_ns), default=None)
    return stopped_ns if stopped_ns is None or stopped_ns <= min(left_ns, default=stopped_ns) else None


def list_interrupts(recording: Evidence) -> list[int]:
    """Return when a launcher printed that it was told to end, and when ranks printed that they were interrupted."""
    printed = read_printed_ends(recording.at)
    return [*printed.interrupts_ns, *([printed.stopped_ns] if printed.stopped_ns is not None else [])]


def _build_seen(
    recording: Evidence, group: Group, silence: _Silence, known_ns: int, standstill: Standstill, *, is_over: bool = False
) -> Finding:
    odd = standstill.odd
    shown = odd if odd is not None else standstill.groups[0]
    difference = standstill.difference
    place = shown.place if difference is None else difference.calls[0][1].place or shown.place
    departure = standstill.departure
    worker = _find_worker(group, shown, silence.since_ns, known_ns)
    line = (departure.place if departure is not None else place).partition(" in ")[0]
    said = describe_odd(standstill, _ENDED_WIDTH if is_over else _ODD_WIDTH)
    # For a single group the headline says everything, unless it is too long.
    is_only = len(standstill.groups) == 1
    told = [
        one for one in standstill.groups if (one is not odd and not is_only) or (one.place not in said and departure is None)
    ]
    ranks = list(odd.ranks) if odd is not None else None
    dead = _find_dead_threads(recording, group, standstill, known_ns)
    kind = change_by_fault(recording, group, _AT_END if is_over else _SEEN, ranks or [], (silence.since_ns, known_ns))
    return kind.at(
        group,
        silence.since_ns,
        known_ns,
        {
            "silent_s": (known_ns - silence.since_ns) / 1e9,
            "iteration_s": silence.usual_s,
            "dead_threads": len(dead) or None,
            "reads": shown.reads or None,
        },
        ranks=ranks,
        odd=said,
        groups=" ".join(f"{describe_group(one)}." for one in told) or None,
        departure=describe_departure(standstill, _count_finished(group, ranks, known_ns)) or None,
        untrained=describe_reads(standstill, group.step_at(silence.since_ns)) or None,
        silence=_NOT_TRAINED if shown.reads else _NO_PHASE,
        threads=describe_threads(standstill) or _describe_dead_thread(dead),
        collectives=describe_collectives(standstill) or None,
        worker=worker.text if worker is not None else None,
        advice=write_advice(standstill) if worker is None else _OF_WORKER,
        line=(line if worker is None else worker.location) or None,
        cost=1.0,
    )


def _find_worker(group: Group, shown: StackGroup, since_ns: int, known_ns: int) -> CodeLine | None:
    """Return the line of the job's code at which py-spy saw a worker of the data loader that a rank waits for."""
    if shown.wait is None or shown.wait.kind is not WaitKind.DATA:
        return None
    found = (find_own_worker_line(one, since_ns, known_ns) for one in group.processes if one.rank in shown.ranks)
    return next((line for line in found if line is not None), None)


def _count_finished(group: Group, ranks: list[int] | None, known_ns: int) -> int | None:
    """Return the number of the step that the first of some ranks has finished last."""
    found = (process.steps_until(known_ns)["step"] for process in group.processes if ranks and process.rank == ranks[0])
    return next((int(steps[-1]) + 1 for steps in found if len(steps)), None)


def _find_dead_threads(recording: Evidence, group: Group, standstill: Standstill, known_ns: int) -> list[Traceback]:
    """Return the exceptions that ended threads of a rank that waits for a queue or a lock, if no thread is left to help."""
    shown = standstill.odd or standstill.groups[0]
    if shown.wait is None or shown.wait.kind is not WaitKind.LOCK or not shown.stacks or describe_threads(standstill):
        return []
    since_ns = min(process.source.created_ns for process in group.processes)
    ended = [one for one in read_printed_ends(recording.at.at(known_ns)).tracebacks if one.thread]
    is_only = len(group.processes) == 1
    return [one for one in ended if one.time_ns >= since_ns and (one.rank in shown.ranks or (one.rank is None and is_only))]


def _describe_dead_thread(dead: Sequence[Traceback]) -> str | None:
    if not dead:
        return None
    said = dead[-1].describe()
    place = f" at {said['place']}" if said["place"] else ""
    return f"{name_thread(dead[-1].thread)} had ended with {said['error']}{place}: no other thread runs the job's code."


def _build_unseen(recording: Evidence, group: Group, last: list[_Last], silence: _Silence, known_ns: int) -> Finding:
    """Build a finding without stacks. ``last``: the phase of each process that is in progress."""
    reached: Ints = np.array([one.begin_ns for one in last])
    slowest = int(np.argmin(reached))
    behind_s = float(np.median(reached) - reached[slowest]) / 1e9
    is_behind = len(reached) > 1 and behind_s > 0
    rank = group.processes[slowest].rank
    phases = sorted({_describe_phase(one) for index, one in enumerate(last) if index != slowest})
    others = f"{'the other one' if len(last) == 2 else 'the others'} {' and '.join(phases)}"
    ranks = [rank] if is_behind else None
    usual = _KIND.with_changes(confidence=0.8 if is_behind else 0.6)
    kind = change_by_fault(recording, group, usual, ranks or [], (silence.since_ns, known_ns))
    return kind.at(
        group,
        silence.since_ns,
        known_ns,
        {"silent_s": (known_ns - silence.since_ns) / 1e9, "iteration_s": silence.usual_s, "behind_s": behind_s},
        ranks=ranks,
        hung_rank=rank if is_behind else None,
        phase=_describe_phase(last[slowest]),
        others=others if is_behind else None,
        hung="the rank that is behind" if is_behind else "each rank",
        pid=group.processes[slowest].source.pid,
        cost=1.0,
    )


def _describe_phase(last: _Last) -> str:
    return last.phase if last.phase == BETWEEN_PHASES else f"in {last.phase}"


def _name_phase(part: Samples) -> str:
    code = int(part.rows["phase"][-1]) if len(part) else 0
    return PHASES[code] if code < len(PHASES) else "a phase"
