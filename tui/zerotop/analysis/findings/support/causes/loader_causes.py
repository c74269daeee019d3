"""Why a rank waits for its data: the activity of its DataLoader workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zerotop.analysis.code_line import CodeLine, OwnFrame, find_own
from zerotop.analysis.findings.support.causes.step_change import Advice
from zerotop.analysis.findings.support.evidence import Process
from zerotop.analysis.findings.support.finding import FindingKind
from zerotop.analysis.findings.support.host_load import measure_spare_cores
from zerotop.analysis.formatting import Text, pluralize
from zerotop.recording.samples import read_column
from zerotop_probe.recording.events import LoaderStacks, SampledFrame, SampledStack

# Shares of the workers: that wait for the disk at a moment, that wait for a core, that compute.
_BLOCKED_SHARE, _WAITING_SHARE, _BUSY_SHARE = 0.5, 0.25, 0.75
# Below this share of computing and waiting for a core, workers hardly run.
_AWAKE_SHARE = 0.5

_DISK: Advice = ("Read from a faster disk, or keep the data in memory: more workers would wait too.", "cp -r DATA /dev/shm/")
_CORES: Advice = ("Give the job more cores, or start fewer workers: its workers wait for cores.", "{fewer_workers_fix}")
_BUSY: Advice = ("Start more workers, or do what they compute once, before the training.", "{worker_setting}={more}")
_MORE: Advice = ("Raise {worker_count}, or prepare the data once, before the training.", "{worker_setting}={more}")
_FULL: Advice = ("Prepare the data once, before the training: the job has no core for {more_workers}.", "[{location}]")
_MORE_CORES: Advice = ("Give the job more cores: its only worker waits for one.", "taskset -pc {pid}")
_ASLEEP: Advice = (
    "See what the workers wait for. More workers help if each waits for its own file or server, but not if all wait"
    " for one lock.",
    "py-spy dump --pid $(pgrep -P {pid} | head -1)",
)
_ASLEEP_AT: Advice = (
    "See what the workers wait for at {location}. More workers help if each waits for its own file or server, but not if"
    " all wait for one lock.",
    "{location}",
)
_LOCKED: Advice = ("Let each worker read at {location} without that lock: more workers would wait for it too.", "{location}")
_LOCKS = {(name,) for name in ("flock", "lockf", "fcntl_lock", "acquire", "sem_wait", "sem_clockwait", "do_futex_wait")}
_FIRST_WORKERS = 4  # at most, where there are none
_WORKER_LOOP = "torch/utils/data/_utils/worker.py"
# py-spy has read the workers at most so long after a finding (ns).
_LATE_NS = 60_000_000_000


class LoaderCause(NamedTuple):
    """The activity of the workers, as a clause, and advice; empty if more workers help."""

    text: Text
    advice: Advice | None = None

    def advise(self, kind: FindingKind, own: str = "") -> FindingKind:
        """Return the kind with advice about the workers, after the kind's ``own``, and what can be copied for them."""
        if self.advice is None:
            return kind
        advice, fix = self.advice
        return kind.with_changes(advice=f"{own} {advice}".lstrip(), fix=fix)


def find_worker_line(process: Process, begin_ns: int, end_ns: int) -> CodeLine | None:
    """Return the line of the job's code at which most workers were seen in a time window; None if it is unknown."""
    found = [
        (own, event.pid == process.source.pid)
        for event in process.recording.events_of(LoaderStacks)
        if event.writer.host == process.host and begin_ns <= event.unix_ns <= end_ns
        for stack in event.stacks
        if (own := _find_worker_frame(event.frames, stack)) is not None
    ]
    # Only one rank of a node is examined each minute.
    lines = [CodeLine(*own[:4]) for own, is_own in found if is_own] or [CodeLine(*own[:4]) for own, _ in found]
    return max(lines, key=lines.count, default=None)


def find_late_line(process: Process, begin_ns: int, known_ns: int) -> int | None:
    """Return when the line of a rank's workers became known, if that was only after ``known_ns``; None while it is unknown.

    py-spy reads them while the rank waits, seconds after that has begun.
    """
    if find_worker_line(process, begin_ns, known_ns) is not None:
        return None
    stacks = process.recording.events_of(LoaderStacks)
    times = sorted(event.unix_ns for event in stacks if known_ns < event.unix_ns <= known_ns + _LATE_NS)
    return next((time_ns for time_ns in times if find_worker_line(process, begin_ns, time_ns) is not None), None)


def _find_worker_frame(frames: Sequence[SampledFrame], stack: SampledStack) -> OwnFrame | None:
    """Return the job's own frame inside the worker's loop. Frames further out are those of the rank that forked it."""
    inner = stack.frames
    for index, number in enumerate(inner):
        if 0 <= number < len(frames) and frames[number].file.endswith(_WORKER_LOOP):
            # Of C code only the innermost function counts, which is the stack's call.
            python = [inside for inside in inner[:index] if 0 <= inside < len(frames) and frames[inside].line]
            return find_own(frames, SampledStack({**stack.facts, "frames": python}))
    return None


def find_loader_cause(process: Process, begin_ns: int, end_ns: int) -> LoaderCause | None:
    """Return the activity of a rank's workers in a time window; None if it is unknown."""
    cause = _measure_workers(process, begin_ns, end_ns)
    line = find_worker_line(process, begin_ns, end_ns) if cause is not None else None
    if cause is None or line is None:
        return cause
    text = Text("{cause}; py-spy shows {line}", {"cause": cause.text, "line": line.text})
    is_locked = line.callees[-1:] in _LOCKS
    advice = _LOCKED if is_locked else _ASLEEP_AT if cause.advice is _ASLEEP else cause.advice
    if advice is not None:
        advice = advice[0].replace("{location}", line.location), advice[1].replace("{location}", line.location)
    return LoaderCause(text, advice)


def _measure_workers(process: Process, begin_ns: int, end_ns: int) -> LoaderCause | None:
    rows = process.host_samples.read_window(begin_ns, end_ns).rows
    workers = read_column(rows, "loader_workers") if len(rows) else np.empty(0)
    rows, workers = rows[workers >= 0], workers[workers >= 0]
    if not len(rows):
        return None
    count = float(np.median(workers))
    spare = measure_spare_cores(process, begin_ns, end_ns)
    if not count:
        return LoaderCause(Text("it has no loader worker", {}), _advise_more(_MORE, 0, spare))
    names = ("loader_cores", "loader_waiting_cores", "loader_blocked")
    used, waiting, blocked = (float(np.nan_to_num(read_column(rows, name)).mean()) for name in names)
    is_one = round(count) == 1
    verbs = {"use": "uses", "wait": "waits", "run": "runs"} if is_one else {"use": "use", "wait": "wait", "run": "run"}
    values = {"count": count, "workers": pluralize(round(count), "loader worker"), **verbs, "used": used, "blocked": blocked}
    # Those that compute may do so for what they have read.
    if blocked >= _BLOCKED_SHARE * max(count - used, _BLOCKED_SHARE * count):
        return LoaderCause(Text("{blocked:.1f} of {count:.0f} {workers} wait for the disk", values), _DISK)
    # One that lacks a core is always runnable; one that sleeps or waits for something else is not.
    if waiting >= _WAITING_SHARE * count and used + waiting >= _BUSY_SHARE * count:
        return LoaderCause(
            Text("{count:.0f} {workers} {use} {used:.1f} cores and {wait} for more", values),
            _CORES if count > 1 else _MORE_CORES,
        )
    if used >= _BUSY_SHARE * count:
        advice = _advise_more(_BUSY, round(count), spare)
        return LoaderCause(Text("{count:.0f} {workers} {use} {used:.1f} cores: each is busy", values), advice)
    text = "{count:.0f} {workers} {use} {used:.1f} cores"
    if used + waiting < _AWAKE_SHARE * count:
        return LoaderCause(Text(f"{text}, and hardly {{run}}", values), _ASLEEP)
    return LoaderCause(Text(text, values), _advise_more(_MORE, round(count), spare))


def _advise_more(advice: Advice, count: int, spare: float | None) -> Advice:
    """Return advice to start more than ``count`` workers, twice as many at most, as far as there are spare cores."""
    most = 2 * count if count else _FIRST_WORKERS
    more = most if spare is None else min(most, count + int(spare))
    if more <= count:
        return _FULL[0].replace("{more_workers}", "more workers" if count else "workers"), _FULL[1]
    return advice[0], advice[1].replace("{more}", str(more))
