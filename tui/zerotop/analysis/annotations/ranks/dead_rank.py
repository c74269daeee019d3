"""A rank's process ended too early: a signal killed it, an exception ended it, or it vanished."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from itertools import chain
from typing import Any

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Process
from zerotop.analysis.annotations.support.gpu_faults import change_by_fault
from zerotop.analysis.annotations.support.shortage_kinds import choose_shortage_kind
from zerotop.analysis.annotations.support.thresholds import HOST_GROWTH_BYTES
from zerotop.analysis.failures.rank_ends import ONE_LOOK_NS, RankEnd, find_ends, find_output_file, read_printed_ends
from zerotop.analysis.failures.senders import Reason, find_senders
from zerotop.analysis.formatting import format_ranks
from zerotop.session.output.tail import read_last_lines
from zerotop.session.steps.step_memory import measure_held_bytes
from zerotop_probe.recording import events

_KIND = FindingKind(
    name="dead_rank",
    severity=Severity.ERROR,
    confidence=0.9,
    headline="{dead} died unexpectedly[ after {steps:count step}]{early}",
    details="Process {pid}.[ {together}][ {others:Ranks} failed because of that.]",
    advice="Look at its last output and at the kernel's log. Saving more often limits how much work is lost.",
    fix="dmesg -T | grep -i kill",
)
_SIGNALLED = _KIND.with_changes(
    confidence=0.95,
    headline="{ended} was killed by signal {number} ({signal})[ after {steps:count step}]{early}",
    details="Process {pid}[, as {launcher} printed].[ {together}][ {others:Ranks} failed because of that.]",
)
_OUT_OF_MEMORY = "The kernel killed a process of its control group for lack of memory just then."
_KILLED = _SIGNALLED.with_changes(
    details=f"{_OUT_OF_MEMORY} {_SIGNALLED.details}",
    advice="Use less host memory: {less_host_memory}.",
    fix="{less_host_memory_fix}",
)
_KILLED_BY_SCHEDULER = _KILLED.with_changes(
    details=f"{{scheduler}} printed that the job used more memory than it was given. {_SIGNALLED.details}"
)
_VANISHED_KILLED = _KILLED.with_changes(headline=_KIND.headline, details=f"{_OUT_OF_MEMORY} {_KIND.details}")
_SENT = _SIGNALLED.with_changes(
    details=(
        "The kernel killed no process of its control group for lack of memory: another process sent the signal.["
        " Its host memory had grown by {grown_bytes:bytes} to {host_held_bytes:bytes} since its last step.] "
        f"{_SIGNALLED.details}"
    ),
    advice="Find out what ends processes on the node: a memory watchdog, a limit of the scheduler, or a script. The kernel's"
    " audit log names the sender of the next one.",
    fix="auditctl -a always,exit -F arch=b64 -S kill -F a1={number}",
)
_CRASHED = _SIGNALLED.with_changes(
    advice="Compiled code crashed: let Python print which line called it. Saving more often limits how much work is lost.",
    fix="PYTHONFAULTHANDLER=1",
)
_OTHER_SIZE = _SIGNALLED.with_changes(
    confidence=0.95,
    headline="{ended} got {received:,} bytes in a collective where it expected {expected:,}",
    details=f"The ranks passed tensors of different sizes to one collective, and gloo aborts. {_SIGNALLED.details}",
    advice="All ranks must pass tensors of one shape. With this variable PyTorch compares them, and prints both shapes.",
    fix="TORCH_DISTRIBUTED_DEBUG=DETAIL",
)
_RAISED = _KIND.with_changes(
    confidence=0.95,
    headline="Rank {rank} ended with {error}[ at {place}]",
    details="{text}[ {others:Ranks} failed because of that.][ {launcher} printed exit code {code}.]",
    advice="Its output has the traceback.",
    fix="[{line}]",
)
_LEFT_ALONE = _RAISED.with_changes(
    headline="Rank {early_rank} ended without an error after {early_steps:count step}: rank {rank} lost it and failed",
    details="Rank {rank} ended with {error}[ at {place}].[ {others:Ranks} failed because of that.]",
    advice=(
        "See why rank {early_rank} leaves the loop before the others: sys.exit(), a data loader with fewer batches, or a"
        " condition that differs between ranks."
    ),
    fix="drop_last=True",
)
_EXITED = _KIND.with_changes(
    headline="{ended} ended with exit code {code}[ after {steps:count step}]{early}",
    details=(
        "Process {pid}[, as {launcher} printed], without a traceback.[ {together}][ {others:Ranks} failed because of that.]"
    ),
    advice="Its last output may say why it ended.",
    fix="",
)
_FILE = "[ Its last output is in {file}.]"
_GLOO_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (?P<received>\d+) vs (?P<expected>\d+)")
_CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
# Within this time after a rank's end, launchers print how it ended.
_LAUNCHER_NS = 5 * 10**9
# A rank that dies of an out-of-memory error ends within this time.
_LAST_MEMORY_NS = 60 * 10**9
# A rank that was not sampled for this long had ended.
_SAMPLED_NS = 200_000_000
_LONGEST_PLACE = 40
_LONGEST_TEXT = 240


class _State:
    checked_ns = 0  # ends known until then have been examined


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report the first rank that died in each attempt: the others fail because of it. None if the job was being stopped."""
    for group in recording.groups:
        state = group.get_state(_State)
        for end_ns in [] if _KIND.name in group.reported else _list_ends(recording, group):
            known_ns = _find_known(recording, group, end_ns)
            if known_ns is None:
                break
            if known_ns > state.checked_ns:
                state.checked_ns = known_ns
                if (finding := _check_ends(recording, group, known_ns)) is not None:
                    group.reported.add(_KIND.name)
                    yield finding
                    break


def _list_ends(recording: Evidence, group: Group) -> list[int]:
    """Return when processes of an attempt ended, in order."""
    keys = {process.key for process in group.processes}
    ends = [event.unix_ns for event in recording.events_of(events.RankGone) if event.process_key in keys]
    ends += [event.unix_ns for process in group.processes for event in process.events_of(events.Goodbye)]
    return sorted(ends)


def _find_known(recording: Evidence, group: Group, end_ns: int) -> int | None:
    """Return when the end of a process became known; None while that is open."""
    begin_ns = group.lead.source.created_ns
    job_ends = [event.unix_ns for event in recording.events_of(events.JobEnded) if event.unix_ns >= begin_ns]
    if not job_ends and _has_unread_files(recording, group, end_ns):
        return None
    limits = [end_ns + _LAUNCHER_NS, *(max(end_ns, job_end_ns) for job_end_ns in job_ends)]
    until_ns = min(*limits, recording.cursor_ns)
    reports = read_printed_ends(recording.at.at(until_ns)).reports
    times = [one.time_ns for one in reports if one.is_first and one.time_ns >= begin_ns]
    # Other ranks that ended at the same time are known by then too: the first of them counts.
    known_ns = min([*limits, *(max(end_ns, time_ns) + ONE_LOOK_NS for time_ns in times)])
    return known_ns if known_ns <= recording.cursor_ns else None


def _has_unread_files(recording: Evidence, group: Group, end_ns: int) -> bool:
    """Whether a rank has ended that wrote to a file, which is read when the sampler finds the rank gone."""
    files = {event.process_key for event in recording.events_of(events.OutputFiles)}
    gone = {event.process_key for event in recording.events_of(events.RankGone)}
    ended = [process for process in group.processes if process.key in files - gone]
    return any(event.unix_ns <= end_ns for process in ended for event in process.events_of(events.Goodbye))


def _check_ends(recording: Evidence, group: Group, known_ns: int) -> Annotation | None:
    processes = {process.key: process for process in group.processes if process.events_of(events.Hello)}
    ends = find_ends(recording.at.at(known_ns), [process.source for process in processes.values()])
    first = next(iter(ends), None)
    if first is None or _is_expected(recording, group, first, known_ns):
        return None
    others = sorted(end.process.rank for end in ends[1:] if end.is_consequence)
    dead = [processes[one.host, one.pid] for one in (first.process, *first.alongside)]
    return _build_finding(recording, group, dead, first, known_ns, others)


def _is_expected(recording: Evidence, group: Group, end: RankEnd, known_ns: int) -> bool:
    """Whether the job was being stopped, or a reported lack of memory ended the rank."""
    stops = [event.unix_ns for event in recording.events_of(events.StopSent)]
    # A launcher whose rank has died ends with that rank's exit code: a signal that ends the launcher was sent to it.
    stops += [
        ended.unix_ns
        for ended in recording.events_of(events.JobEnded)
        if ended.signal in _STOP_SIGNALS and ended.unix_ns >= group.lead.source.created_ns
    ]
    stopped_ns = read_printed_ends(recording.at.at(known_ns)).stopped_ns
    if any(stop <= known_ns for stop in stops) or stopped_ns is not None:
        return True
    if end.signal_number is None and _has_run_out_of_memory(group, end, known_ns):
        return True
    if end.traceback is not None:
        return end.traceback.error == "KeyboardInterrupt"
    return end.report is None and _was_taken_down(recording, group, end)


def _has_run_out_of_memory(group: Group, end: RankEnd, known_ns: int) -> bool:
    """Whether the rank reported shortly before that memory was short."""
    errors = [
        event.unix_ns
        for process in group.processes
        if process.rank == end.process.rank
        for event in process.events_of(events.OutOfMemory)
    ]
    return any(known_ns - _LAST_MEMORY_NS <= error <= known_ns for error in errors)


def _was_taken_down(recording: Evidence, group: Group, end: RankEnd) -> bool:
    """Whether another rank had ended normally before this one vanished."""
    gone = recording.events_of(events.RankGone)
    time_ns = next((event.unix_ns for event in gone if event.process_key == (end.process.host, end.process.pid)), 0)
    # If others wait for a rank, it ends within moments of the first one, and its goodbye means nothing.
    ended = [event.unix_ns for process in group.processes for event in process.events_of(events.Goodbye)]
    return any(goodbye < time_ns and any(goodbye <= event.unix_ns < time_ns for event in gone) for goodbye in ended)


def _build_finding(
    recording: Evidence, group: Group, dead: list[Process], end: RankEnd, known_ns: int, others: list[int]
) -> Annotation:
    process, *alongside = dead
    ended_ns = min(_find_end(recording, process), known_ns)
    sample, finished = process.host_samples.read_last(ended_ns), _count_steps(process, ended_ns)
    is_same = all(_count_steps(one, ended_ns) == finished for one in alongside)
    pids = " or ".join(str(one.source.pid) for one in dead)
    kills = _count_kills(recording, process, ended_ns, known_ns)
    evidence = {
        "finished_steps": finished if is_same else None,
        "host_held_bytes": int(measure_held_bytes(sample)) if sample is not None and not alongside else None,
        "grown_bytes": _measure_growth(process, ended_ns) if not alongside else None,
        "oom_kills": kills or None,
        "signal_number": end.signal_number,
        "exit_code": end.exit_code,
    }
    early, scheduler = _find_early_end(group, end, ended_ns), _find_scheduler(recording, ended_ns, known_ns)
    shortage = choose_shortage_kind(recording, process.host, process.rank, end.traceback) if early is None else None
    kind, short = shortage if shortage is not None and not end.signal_number else (_choose_kind(end, kills, scheduler), {})
    sizes = _find_sizes(recording, ended_ns, known_ns) if kind is _CRASHED else {}
    kind = _OTHER_SIZE if sizes else kind
    kind = _LEFT_ALONE if early is not None else kind
    kind = change_by_fault(recording, group, kind, end.ranks, (ended_ns, known_ns))
    return kind.with_changes(details=f"{kind.details}{_FILE}").at(
        process,
        ended_ns,
        known_ns,
        evidence,
        ranks=end.ranks,
        pid=pids,
        ended=f"{end.who[0].upper()}{end.who[1:]}",
        dead=format_ranks(end.ranks).capitalize() if alongside else f"Rank {process.rank}'s process {pids}",
        together=end.order_sentence or None,
        steps=finished or None if is_same else None,
        early="" if finished or not is_same else " before its first step was finished",
        others=others or None,
        launcher=end.report.launcher or None if end.report is not None else None,
        code=end.exit_code,
        number=end.signal_number,
        signal=end.signal_name,
        scheduler=scheduler,
        file=find_output_file(recording.at.at(known_ns), end.process) if not alongside else None,
        **_describe_exception(end),
        **short,
        **sizes,
        **(early or {}),
    )


def _count_steps(process: Process, until_ns: int) -> int:
    steps = process.steps_until(until_ns)
    return int(steps["step"][-1]) + 1 if len(steps) else 0


def _find_early_end(group: Group, end: RankEnd, ended_ns: int) -> dict[str, Any] | None:
    """Return the rank whose normal end cost this one its connection; None if there was none."""
    if end.traceback is None or not end.traceback.is_lost_peer:
        return None
    for other in group.processes:
        ends = [event for event in other.events_of(events.Goodbye) if event.unix_ns < ended_ns]
        steps = other.steps_until(ended_ns)
        if other.rank != end.process.rank and ends and len(steps):
            return {"early_rank": other.rank, "early_steps": int(steps["step"][-1]) + 1}
    return None


def _find_end(recording: Evidence, process: Process) -> int:
    gone = [event.unix_ns for event in recording.events_of(events.RankGone) if event.process_key == process.key]
    goodbyes = [event.unix_ns for event in process.events_of(events.Goodbye)]
    return min([*gone, *goodbyes], default=recording.cursor_ns)


def _measure_growth(process: Process, ended_ns: int) -> int | None:
    """Return the growth of its host memory after its last step; None if it was small."""
    steps, last = process.steps_until(ended_ns), process.host_samples.read_last(ended_ns)
    before = process.host_samples.read_last(int(steps["end_unix_ns"][-1])) if len(steps) else None
    grown = int(measure_held_bytes(last) - measure_held_bytes(before)) if before is not None else 0
    return grown if grown >= HOST_GROWTH_BYTES else None


def _find_scheduler(recording: Evidence, ended_ns: int, known_ns: int) -> str | None:
    """Return the scheduler that reported too much memory use around the time of a rank's end."""
    senders = chain.from_iterable(map(find_senders, read_last_lines(recording.at.at(known_ns))))
    times = range(ended_ns - _LAST_MEMORY_NS, known_ns + 1)
    return next((one.name for one in senders if one.reason is Reason.MEMORY and one.time_ns in times), None)


def _find_sizes(recording: Evidence, ended_ns: int, known_ns: int) -> dict[str, int]:
    """Return what gloo printed about a tensor of an unexpected size when it ended a process; empty if it did not."""
    times = range(ended_ns - _LAST_MEMORY_NS, known_ns + 1)
    lines = chain.from_iterable(read_last_lines(recording.at.at(known_ns)))
    found = (_GLOO_SIZES.search(line.text) for line in lines if line.time_ns in times)
    return next(({name: int(size) for name, size in one.groupdict().items()} for one in found if one is not None), {})


def _choose_kind(end: RankEnd, kills: int | None, scheduler: str | None) -> FindingKind:
    if end.traceback is not None and not end.signal_number:
        return _RAISED
    if end.signal_number == signal.SIGKILL and scheduler is not None:
        return _KILLED_BY_SCHEDULER
    if end.signal_number == signal.SIGKILL and kills == 0:
        return _SENT
    if end.signal_number:
        return _KILLED if kills else _CRASHED if end.signal_number in _CRASH_SIGNALS else _SIGNALLED
    return _EXITED if end.exit_code else _VANISHED_KILLED if kills else _KIND


def _describe_exception(end: RankEnd) -> dict[str, Any]:
    traceback = end.traceback
    if traceback is None:
        return {}
    line = traceback.place.partition(" in ")[0]
    place = traceback.place if len(traceback.place) <= _LONGEST_PLACE else line
    text = traceback.text.rstrip()
    text = text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}..."
    ending = "" if text.endswith((".", "!", "?")) else "."
    return {"error": traceback.error, "place": place or None, "line": line or None, "text": f"{text}{ending}"}


def _count_kills(recording: Evidence, process: Process, ended_ns: int, known_ns: int) -> int | None:
    """Count the processes that the kernel killed for lack of memory since three seconds before; None if unknown."""
    begin_ns = ended_ns - 3 * 10**9
    samples = recording.at.records("hosts", process.host).read_window(begin_ns, known_ns)
    seen = process.host_samples.read_window(begin_ns, ended_ns).times
    last_ns = int(seen[-1]) + _SAMPLED_NS if len(seen) else ended_ns
    if not len(samples) or samples.rows["cgroup_oom_kills"].min() < 0:
        return None
    kills = int(samples.rows["cgroup_oom_kills"][-1] - samples.rows["cgroup_oom_kills"][0])
    return kills if kills or samples.times[-1] >= last_ns else None
