"""Why a rank waits for its data: the activity of its DataLoader workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zerotop.analysis.code_line import CodeLine, OwnFrame, find_own
from zerotop.analysis.findings.support.causes.step_change import Advice
from zerotop.analysis.findings.support.evidence import Process
from zerotop.analysis.findings.support.finding import FindingKind
from zerotop.analysis.findings.support.host_load import measure_spare_cores, measure_thread_use
from zerotop.analysis.formatting import Text, pluralize
from zerotop.recording.samples import Rows, read_column
from zerotop_probe.recording.events import LoaderStacks, SampledFrame, SampledStack

# Shares of the workers: that wait for the disk at a moment, that wait for a core, that compute.
_BLOCKED_SHARE, _WAITING_SHARE, _BUSY_SHARE = 0.5, 0.25, 0.75
# Below this share of computing and waiting for a core, workers hardly run.
_AWAKE_SHARE = 0.5
# Workers that use this many times the cores that they used before have become busier.
_BUSIER_TIMES = 1.5

# Workers that were there so shortly before a wait (ns), and in most of the training before, were those of its loader.
_LEFT_NS, _MOST_SHARE = 5_000_000_000, 0.5

_DISK: Advice = ("Read from a faster disk, or keep the data in memory: more workers would wait too.", "cp -r DATA /dev/shm/")
_CORES: Advice = ("Give the job more cores, or start fewer workers: its workers wait for cores.", "{fewer_workers_fix}")
_BUSY: Advice = ("Start more workers, or do what they compute once, before the training.", "{worker_setting}={more}")
KEEP_WORKERS: Advice = (
    "A new DataLoader or iterator starts new workers: create it once, and let it keep them.",
    "persistent_workers=True",
)
MORE_WORKERS = "Raise {worker_count}, or prepare the data once, before the training."
_MORE: Advice = (MORE_WORKERS, "{worker_setting}={more}")
_FULL: Advice = ("Prepare the data once, before the training: the job has no core for {more_workers}.", "[{location}]")
_MAYBE_FULL: Advice = (
    "Try {worker_count}: workers help if the loading waits for files or a server. If it computes, prepare the data once,"
    " before the training: the job has no core for workers.",
    "{worker_setting}={more}",
)
_KEEP: Advice = ("Give this loader the workers that the one before it had.", "{worker_setting}={before}")
_WAITS: Advice = (
    "Raise {worker_count}: the loading hardly computes, so workers need no core of their own, if they do not wait for one"
    " lock.",
    "{worker_setting}={more}",
)
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
_ONE_SLOW: Advice = (
    "See what differs for that worker at {location}: batches come in order, so the others wait for it. More workers would"
    " wait, too.",
    "{location}",
)
_LOCKS = {(name,) for name in ("flock", "lockf", "fcntl_lock", "acquire", "sem_wait", "sem_clockwait", "do_futex_wait")}
_FIRST_WORKERS = 4  # at most, where there are none
_WAITING_WORKERS = 2  # at least, if they may need no core
# A core of which no more is used can take a worker: the sampler itself uses a few percent of one.
_USED_SHARE = 0.25
# The part of the time of loading that is computing, or not, for sure.
_SURE_SHARE = 0.5
_WORKER_LOOP, _FETCH = "torch/utils/data/_utils/worker.py", "torch/utils/data/_utils/fetch.py"
# One worker is slow if it loads a batch whenever all are read, so often that the same one of n would be met by chance in one
# of so many cases, and the others load in at most this share of their looks.
_LEAST_LOOKS, _CHANCE, _OTHERS_LOADING = 3, 16, 0.25
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
    """Return the line of the job's code at which most workers were seen in a time window; None if it is unknown.

    Only one rank of a node is examined each minute: the workers of others stand for its own.
    """
    return find_own_worker_line(process, begin_ns, end_ns) or _find_line(process, begin_ns, end_ns)


def find_own_worker_line(process: Process, begin_ns: int, end_ns: int) -> CodeLine | None:
    """Return the line at which most workers of the rank itself were seen in a time window; None if it is unknown."""
    return _find_line(process, begin_ns, end_ns, process.source.pid)


def _find_line(process: Process, begin_ns: int, end_ns: int, pid: int | None = None) -> CodeLine | None:
    lines = [
        CodeLine(*own[:4])
        for event in process.recording.events_of(LoaderStacks)
        if event.writer.host == process.host and begin_ns <= event.unix_ns <= end_ns and pid in (None, event.pid)
        for stack in event.stacks
        if (own := _find_worker_frame(event.frames, stack)) is not None
    ]
    return max(lines, key=lines.count, default=None)


class SlowWorker(NamedTuple):
    """A worker for which the others of its loader wait."""

    number: int  # 1 for the worker that was started first
    workers: int  # that were read
    line: CodeLine


def find_slow_worker(process: Process, begin_ns: int, end_ns: int) -> SlowWorker | None:
    """Return the worker that was loading a batch whenever py-spy read the workers, while others were idle."""
    looks = _list_looks(process, begin_ns, end_ns)
    workers = list(looks[0]) if looks else []
    if len(looks) < _LEAST_LOOKS or len(workers) ** (len(looks) - 1) < _CHANCE:
        return None
    if any(list(look) != workers for look in looks):
        return None  # not all were read, or they were started again
    loading = [sum(_is_loading(look[pid]) for look in looks) for pid in workers]
    others = sum(loading) - len(looks)
    if loading.count(len(looks)) != 1 or others > _OTHERS_LOADING * len(looks) * (len(workers) - 1):
        return None
    index = loading.index(len(looks))
    events = [look[workers[index]] for look in looks]
    lines = [
        CodeLine(*own[:4]) for event in events if (own := _find_worker_frame(event.frames, event.stacks[0])) is not None
    ]
    return SlowWorker(index + 1, len(workers), max(lines, key=lines.count)) if lines else None


def _list_looks(process: Process, begin_ns: int, end_ns: int) -> list[dict[int, LoaderStacks]]:
    """Return what py-spy read of a rank's workers at each look, by their process ids, in their order."""
    looks: list[dict[int, LoaderStacks]] = []
    for event in process.recording.events_of(LoaderStacks):
        is_own = event.writer.host == process.host and event.pid == process.source.pid
        if is_own and begin_ns <= event.unix_ns <= end_ns and event.stacks:
            if not looks or event.worker in looks[-1]:
                looks.append({})
            looks[-1][event.worker] = event
    if len(looks) > 1 and len(looks[-1]) < len(looks[0]):
        looks.pop()  # it is not over
    return looks


def _is_loading(event: LoaderStacks) -> bool:
    return any(frame.file.endswith(_FETCH) for frame in event.frames)


def list_late_times(process: Process, begin_ns: int, known_ns: int) -> list[int]:
    """Return when the line of a rank's workers, and which one is slow, became known, as far as that was after ``known_ns``.

    py-spy reads them while the rank waits, seconds after that has begun.
    """
    stacks = process.recording.events_of(LoaderStacks)
    times = sorted(event.unix_ns for event in stacks if known_ns < event.unix_ns <= known_ns + _LATE_NS)
    finds = [find for find in (find_worker_line, find_slow_worker) if find(process, begin_ns, known_ns) is None]
    late = (next((time_ns for time_ns in times if find(process, begin_ns, time_ns) is not None), None) for find in finds)
    return sorted({time_ns for time_ns in late if time_ns is not None})


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
    if (slow := find_slow_worker(process, begin_ns, end_ns)) is not None:
        values = {"number": slow.number, "count": slow.workers, "line": slow.line.text}
        said = Text(
            "worker {number:.0f} of {count:.0f} is slow: the others wait for it, and py-spy shows it at {line}", values
        )
        return LoaderCause(said, (_fill_in(_ONE_SLOW[0], slow.line), _fill_in(_ONE_SLOW[1], slow.line)))
    text = Text("{cause}; py-spy shows {line}", {"cause": cause.text, "line": line.text})
    is_locked = line.callees[-1:] in _LOCKS
    advice = _LOCKED if is_locked else _ASLEEP_AT if cause.advice is _ASLEEP else cause.advice
    if advice is not None:
        advice = _fill_in(advice[0], line), _fill_in(advice[1], line)
    return LoaderCause(text, advice)


def _fill_in(text: str, line: CodeLine) -> str:
    return text.replace("{location}", line.location)


def _measure_workers(process: Process, begin_ns: int, end_ns: int) -> LoaderCause | None:
    rows = process.host_samples.read_window(begin_ns, end_ns).rows
    workers = read_column(rows, "loader_workers") if len(rows) else np.empty(0)
    rows, workers = rows[workers >= 0], workers[workers >= 0]
    if not len(rows):
        return None
    count = float(np.median(workers))
    spare = measure_spare_cores(process, begin_ns, end_ns)
    if not count:
        return _judge_own_loading(process, begin_ns, end_ns, spare)
    used, waiting, blocked = _average_use(rows)
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
        before = _measure_before(process, begin_ns, count)
        is_busier = before is not None and used >= _BUSIER_TIMES * before
        values["before"] = before if is_busier else None
        return LoaderCause(
            Text("{count:.0f} {workers} {use} {used:.1f} cores[ instead of {before:.1f}]: each is busy", values), advice
        )
    text = "{count:.0f} {workers} {use} {used:.1f} cores"
    if used + waiting < _AWAKE_SHARE * count:
        return LoaderCause(Text(f"{text}, and hardly {{run}}", values), _ASLEEP)
    return LoaderCause(Text(text, values), _advise_more(_MORE, round(count), spare))


def _average_use(rows: Rows) -> tuple[float, float, float]:
    """Return the cores that workers use, those that they wait for, and how many wait for the disk."""
    names = ("loader_cores", "loader_waiting_cores", "loader_blocked")
    used, waiting, blocked = (float(np.nan_to_num(read_column(rows, name)).mean()) for name in names)
    return used, waiting, blocked


def are_workers_busy(process: Process, begin_ns: int, end_ns: int) -> bool:
    """Whether most of a rank's workers compute, lack a core or wait for the disk."""
    rows = process.host_samples.read_window(begin_ns, end_ns).rows
    rows = rows[read_column(rows, "loader_workers") > 0] if len(rows) else rows
    return bool(len(rows)) and sum(_average_use(rows)) >= _BUSY_SHARE * float(np.median(read_column(rows, "loader_workers")))


def _measure_before(process: Process, begin_ns: int, count: float) -> float | None:
    """Return the cores that as many workers used in the training up to a time; None if that is not known."""
    steps = process.steps_until(begin_ns)
    samples = process.host_samples.read_window(int(steps["begin_unix_ns"][0]), begin_ns) if len(steps) else None
    if samples is None or not len(samples):
        return None
    rows = samples.rows[read_column(samples.rows, "loader_workers") == count]
    return _average_use(rows)[0] if len(rows) else None


def _judge_own_loading(process: Process, begin_ns: int, end_ns: int, spare: float | None) -> LoaderCause:
    """Return advice for a rank that loads its data itself, by whether it computes meanwhile."""
    told, before = Text("it has no loader worker", {}), _count_before(process, begin_ns)
    if before:
        told = Text("it has no loader worker any more, and had {count:.0f} before", {"count": float(before)})
        return LoaderCause(told, (_KEEP[0], _KEEP[1].replace("{before}", str(before))))
    advice = _advise_more(_MORE, 0, spare)
    shares = _bound_computing(process, begin_ns, end_ns)
    more = str(max(_WAITING_WORKERS, min(_FIRST_WORKERS, int((spare or 0) + _USED_SHARE))))
    if shares is not None and shares[1] <= _SURE_SHARE:
        told = Text("it has no loader worker, and computes for at most {most:percent} of that time", {"most": shares[1]})
        return LoaderCause(told, (_WAITS[0], _WAITS[1].replace("{more}", more)))
    if advice[0] is not _MORE[0] and not (shares is not None and shares[0] >= _SURE_SHARE):
        return LoaderCause(told, (_MAYBE_FULL[0], _MAYBE_FULL[1].replace("{more}", more)))
    return LoaderCause(told, advice)


def _count_before(process: Process, begin_ns: int) -> int:
    """Return the number of workers that a rank had up to shortly before a time; 0 without any."""
    steps = process.steps_until(begin_ns)
    if not len(steps):
        return 0
    samples = process.host_samples.read_window(int(steps["begin_unix_ns"][0]), begin_ns)
    workers = read_column(samples.rows, "loader_workers") if len(samples) else np.empty(0)
    known, times = workers[workers >= 0], samples.times[workers >= 0]
    had = np.flatnonzero(known > 0)
    if not len(had) or times[had[-1]] < begin_ns - _LEFT_NS or len(had) < _MOST_SHARE * (had[-1] + 1):
        return 0
    return round(float(np.median(known[had])))


def _bound_computing(process: Process, begin_ns: int, end_ns: int) -> tuple[float, float] | None:
    """Return the least and the most of its time of loading in which a rank's first thread computed or lacked a core.

    The least is what the thread needed beyond all the time outside of it, the most all that it needed.
    """
    steps = process.phased_steps_until(end_ns)
    steps = steps[steps["begin_unix_ns"] >= begin_ns]
    if not len(steps):
        return None
    last_ns = int(steps["end_unix_ns"][-1])
    use = measure_thread_use(process, int(steps["begin_unix_ns"][0]), last_ns, known_ns=end_ns)
    loading = float(np.nansum(steps["data_s"]) / max(np.nansum(steps["iteration_s"]), 1e-9))
    if use is None or not loading > 0:
        return None
    needed = (use.computed + use.waited) * 1e9 / (last_ns - int(steps["begin_unix_ns"][0]))
    return max(0.0, needed - (1 - loading)) / loading, min(1.0, needed / loading)


def _advise_more(advice: Advice, count: int, spare: float | None) -> Advice:
    """Return advice to start more than ``count`` workers, twice as many at most, as far as there are spare cores."""
    most = 2 * count if count else _FIRST_WORKERS
    more = most if spare is None else min(most, count + int(spare + _USED_SHARE))
    if more <= count:
        return _FULL[0].replace("{more_workers}", "more workers" if count else "workers"), _FULL[1]
    return advice[0], advice[1].replace("{more}", str(more))
