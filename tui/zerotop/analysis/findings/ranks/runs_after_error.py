"""An exception ended the training of a rank, but its process goes on: Python waits for threads or processes to end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from zerotop.analysis.failures.rank_ends import read_printed_ends
from zerotop.analysis.failures.tracebacks import Traceback
from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.evidence import Evidence
from zerotop.analysis.findings.support.links import Kinds, ended_at_last
from zerotop.analysis.formatting import join_words
from zerotop.analysis.hangs.stacks import SILENT, StackReport, ThreadStack, read_silent_stacks
from zerotop_probe.recording.events import Stacks

_KIND = FindingKind(
    name="runs_after_error",
    severity=Severity.ERROR,
    confidence=0.95,
    headline="{error}[ at {place}] ended the training; rank {rank} still runs",
    details="{text} {waited_s:seconds} later its process has not ended: at its exit, Python waits for {awaited}.",
    advice="{advised}",
    fix="[{line}]",
    lasts=True,
    superseded_by=(Kinds(ended_at_last, "dead_rank"),),
)
_THREADS = "Mend the error first. Start {} as a daemon, or end it in a finally block: then the job ends with its error."
_OTHERS = "Mend the error first. Stop what the script has started in a finally block: then the job ends with its error."
# What Python runs when the script is over.
_EXITS = {("threading.py", "_shutdown"): "threads", ("multiprocessing/util.py", "_exit_function"): "child processes"}
# These end a training on purpose.
_STOPS = ("KeyboardInterrupt", "SystemExit")
# Threads that are named.
_MOST_NAMED = 3
# A traceback may have been read this long before the end of the last phase was (ns).
_APART_NS = 10**9


@in_each_attempt(kinds=1)
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report each rank once its stacks show it at its exit, after the exception that it has printed."""
    for process in window.subject.processes:
        fresh = window.items(process.events_of(Stacks), process)
        yield window.find_once(partial(_find, window.recording, window.subject, process, fresh), process)


def _find(recording: Evidence, group: Group, process: Process, fresh: Iterable[Stacks]) -> Finding | None:
    for event in fresh:
        if event.why == SILENT:
            for report in read_silent_stacks(recording.recording, process.process, event.unix_ns - 1, event.unix_ns):
                awaited = _find_exit(report.training)
                traceback = _find_traceback(recording, group, process, report.time_ns) if awaited else None
                if traceback is not None:
                    return _build(process, report, traceback, awaited)
    return None


def _find_exit(training: ThreadStack) -> str:
    """Return what Python waits for after the script's end; "" while the script runs."""
    outermost = training.frames[-1]
    is_over = not any(frame.own for frame in training.frames)
    return _EXITS.get((outermost.file, outermost.function), "") if is_over else ""


def _find_traceback(recording: Evidence, group: Group, process: Process, known_ns: int) -> Traceback | None:
    """Return the exception that a rank has printed since its last phase."""
    begins = process.records("begins").read_window(process.source.created_ns, known_ns).times
    ends = process.steps_until(known_ns)["end_unix_ns"]
    since_ns = max([process.source.created_ns, *begins[-1:].tolist(), *ends[-1:].tolist()]) - _APART_NS
    for one in reversed(read_printed_ends(recording.at.at(known_ns)).tracebacks):
        is_own = one.rank == process.rank or one.pid == process.source.pid if one.is_marked else len(group.processes) == 1
        if is_own and not one.thread and since_ns <= one.time_ns <= known_ns:
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
