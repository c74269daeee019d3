"""The training of a rank is over, but its process goes on: at its exit, Python waits for threads or processes to end.

An exception ended the training, or the script ended and the threads that Python waits for do wait themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from zerotop.analysis.failures.rank_ends import read_printed_ends
from zerotop.analysis.failures.tracebacks import Traceback
from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.evidence import Evidence
from zerotop.analysis.findings.support.links import TO_HANGS, Kinds, ended_at_last, ended_by_itself, is_simultaneous
from zerotop.analysis.formatting import join_words
from zerotop.analysis.hangs.sentences import name_thread
from zerotop.analysis.hangs.stacks import SILENT, StackReport, ThreadStack, read_silent_stacks
from zerotop.analysis.hangs.waits import WaitKind, find_wait
from zerotop_probe.recording.events import Stacks

_KIND = FindingKind(
    name="runs_after_error",
    severity=Severity.ERROR,
    confidence=0.95,
    headline="{error}[ at {place}] ended the training, but not rank {rank}'s process",
    details="{text} {waited_s:seconds} later it had not ended: at its exit, Python waits for {awaited}.",
    advice="{advised}",
    fix="[{line}]",
    lasts=True,
    explained_by=TO_HANGS,
    superseded_by=(Kinds(ended_at_last, "dead_rank"),),
)
_IDLE = FindingKind(
    name="runs_after_end",
    severity=Severity.ERROR,
    confidence=0.9,
    headline="Training ended, but not rank {rank}'s process: {waiting}",
    details=(
        "{waited_s:seconds} after the last step it had not ended: at its exit, Python waits for all threads that"
        " are no daemons. {named}."
    ),
    advice="{advised}",
    fix="[{line}]",
    lasts=True,
    repeats=(Kinds(is_simultaneous, "runs_after_end", shares_ranks=False),),
    superseded_by=(Kinds(ended_by_itself, "long_end"),),
)
_END = (
    "Have {} end when the training does (where it waits for a queue, put a None for each thread), or start it as a daemon."
)
_POOLED = "Have the function in the pool's thread return when the training ends: Python waits for it."
_POOL = "concurrent/futures/thread.py"
_THREADS = "Mend the error first. Start {} as a daemon, or end it in a finally block: then the job ends with its error."
_OTHERS = "Mend the error first. Stop what the script has started in a finally block: then the job ends with its error."
# What Python runs when the script is over.
_EXITS = {("threading.py", "_shutdown"): "threads", ("multiprocessing/util.py", "_exit_function"): "child processes"}
# These end a training on purpose.
_STOPS = ("KeyboardInterrupt", "SystemExit")
# Threads that are named.
_MOST_NAMED = 3
_LONGEST_STATE = 80 - len("Training ended, but not rank 100's process: ")
# A traceback may have been read this long before the end of the last phase was (ns).
_APART_NS = 10**9


@in_each_attempt(kinds=1)
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report each rank once its stacks show it at its exit, after an exception that it has printed or idle for long."""
    for process in window.subject.processes:
        fresh = window.items(process.events_of(Stacks), process)
        yield window.find_once(partial(_find, window.recording, window.subject, process, fresh), process)


def _find(recording: Evidence, group: Group, process: Process, fresh: Iterable[Stacks]) -> Finding | None:
    for event in fresh:
        if event.why == SILENT:
            since_ns = _find_last_sign(process, event.unix_ns)
            reports = read_silent_stacks(recording.recording, process.process, since_ns, event.unix_ns)[-2:]
            awaited = _find_exit(reports[-1].training) if reports else ""
            if awaited:
                traceback = _find_traceback(recording, group, process, since_ns, event.unix_ns)
                if traceback is not None:
                    return _build(process, reports[-1], traceback, awaited)
                waiting = _find_waiting(reports) if awaited == "threads" else []
                if waiting:
                    return _build_idle(process, since_ns, event.unix_ns, waiting)
    return None


def _find_last_sign(process: Process, known_ns: int) -> int:
    """Return when a process last began a phase or ended a step."""
    begins = process.records("begins").read_window(process.source.created_ns, known_ns).times
    ends = process.steps_until(known_ns)["end_unix_ns"]
    times: list[int] = [process.source.created_ns, *begins[-1:].tolist(), *ends[-1:].tolist()]
    return max(times)


def _find_exit(training: ThreadStack) -> str:
    """Return what Python waits for after the script's end; "" while the script runs."""
    if not training.frames or any(frame.own for frame in training.frames):
        return ""
    outermost = training.frames[-1]
    return _EXITS.get((outermost.file, outermost.function), "")


def _find_waiting(reports: Sequence[StackReport]) -> list[ThreadStack]:
    """Return the threads that keep Python from exiting, if all of them waited at the same place in two silences."""
    before, now = (
        ([one for one in report.threads[1:] if not one.daemon] for report in reports) if len(reports) > 1 else ([], [])
    )
    is_still = bool(now) and now == before and all(find_wait(one).kind is WaitKind.LOCK for one in now)
    return [one for one in now if one.daemon is not None or any(frame.own for frame in one.frames)] if is_still else []


def _find_traceback(recording: Evidence, group: Group, process: Process, since_ns: int, known_ns: int) -> Traceback | None:
    """Return the exception that a rank has printed since its last phase."""
    for one in reversed(read_printed_ends(recording.at.at(known_ns)).tracebacks):
        is_own = one.rank == process.rank or one.pid == process.source.pid if one.is_marked else len(group.processes) == 1
        if is_own and not one.thread and since_ns - _APART_NS <= one.time_ns <= known_ns:
            return one if one.error not in _STOPS else None
    return None


def _build(process: Process, report: StackReport, traceback: Traceback, awaited: str) -> Finding:
    running = [one for one in report.threads[1:] if any(frame.own for frame in one.frames)]
    named = [f"{one.thread} at {one.own_frame.place}" for one in running[:_MOST_NAMED] if one.own_frame is not None]
    is_of_threads = awaited == "threads" and bool(named)
    advised = _THREADS.format(running[0].thread if len(running) == 1 else "each thread") if is_of_threads else _OTHERS
    values: dict[str, Any] = {**traceback.describe(), "advised": advised, "awaited": awaited}
    if is_of_threads:
        values["awaited"] = f"threads, of which {join_words(named)} run{'s' if len(named) == 1 else ''}"
    evidence = {"waited_s": (report.time_ns - traceback.time_ns) / 1e9}
    return _KIND.at(process, traceback.time_ns, report.time_ns, evidence, known_ns=report.time_ns, **values)


def _build_idle(process: Process, since_ns: int, known_ns: int, waiting: Sequence[ThreadStack]) -> Finding:
    states = [f"{name_thread(one.thread)} waits for {find_wait(one).name}" for one in waiting]
    frames = [one.own_frame for one in waiting]
    named = [f"{state} at {frame.place}" for state, frame in zip(states, frames, strict=True) if frame is not None]
    who = name_thread(waiting[0].thread) if len(waiting) == 1 else "each of these threads"
    is_pooled = any(frame.file == _POOL and not frame.own for one in waiting for frame in one.frames)
    lines = {f"{frame.file}:{frame.line}" for frame in frames if frame is not None and frame.own}
    is_short = len(states) == 1 and len(states[0]) <= _LONGEST_STATE
    return _IDLE.at(
        process,
        since_ns,
        known_ns,
        {"waited_s": (known_ns - since_ns) / 1e9},
        known_ns=known_ns,
        waiting=states[0] if is_short else "a thread waits" if len(states) == 1 else f"{len(states)} threads wait",
        named=join_words(named[:_MOST_NAMED]),
        advised=_POOLED if is_pooled else _END.format(who),
        line=lines.pop() if len(lines) == 1 else None,
    )
