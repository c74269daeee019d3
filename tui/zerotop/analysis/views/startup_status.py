"""Describe the startup of a job without an engine: compilation, an abandoned build lock, or no training yet."""

from __future__ import annotations

from zerotop.analysis.formatting import format_long_time
from zerotop.analysis.processes.missing_probe import find_missing_probes
from zerotop.recording.moments.at import At
from zerotop_probe.recording import events

_ENGINE = "Waiting for the training to begin."
_ENTER = " E, or zerotop attach {pid} --enter, loads it while they run."
# Of a job that may only infer: nothing says that it will train.
_UNTRAINED = "No rank has reported a step in the first {duration}. A program that only infers has no steps."
_UNTRAINED_S = 60.0
_COMPILERS = "Compiling {what} for {duration}: 1 to 2 minutes, on the first run only."
_OPERATORS = "DeepSpeed's operators"
# Deleting the lock of a running job is no fix: its ranks would load a library that was never built.
_LOCK = (
    "The ranks sleep, nothing compiles, and no process on their node holds {locks}: they may wait forever for a build of"
    " DeepSpeed's operators that was killed. Unless another job builds there, stop this one, delete {it} and start it again."
)


def describe_wait(at: At) -> str:
    """Return a sentence, by the latest event."""
    if missing := find_missing_probes(at):
        pid = missing[0].events[0].pid
        return " ".join(f"{one.sentence}." for one in missing) + _ENTER.format(pid=pid)
    compiling, locked = at.events_of(events.Compiling), at.events_of(events.BuildLocked)
    if locked and (not compiling or compiling[-1].unix_ns < locked[-1].unix_ns):
        paths = list(dict.fromkeys(event.path for event in locked))
        return _LOCK.format(locks=" and ".join(paths), it="it" if len(paths) == 1 else "them")
    if not compiling:
        passed_s = (at.cursor_ns - at.recording.begin_ns) / 1e9
        return _ENGINE if passed_s < _UNTRAINED_S else _UNTRAINED.format(duration=format_long_time(passed_s))
    duration = format_long_time((at.cursor_ns - compiling[0].unix_ns) / 1e9)
    return _COMPILERS.format(what=compiling[-1].extension or _OPERATORS, duration=duration)
