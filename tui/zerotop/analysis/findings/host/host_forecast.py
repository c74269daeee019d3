"""Host memory will be used up: when, and which rank the kernel kills then.

Forecast from what was left in each second: of the control group's limit or of the node, without pages of files, which the
kernel drops, and with the swap that the job may use; or of the limit at which Ray kills workers. What loading,
checkpoints and evaluations take is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.findings.host.growing_containers import GrowingContainer, find_container
from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_node
from zerotop.analysis.findings.support.gpu_use import name_process
from zerotop.analysis.findings.support.host_load import name_savings
from zerotop.analysis.findings.support.links import Kinds, is_simultaneous, took_half_of_room
from zerotop.analysis.formatting import MIB, format_ranks, join_words
from zerotop.analysis.stats.change_points import SETTLED_STEPS
from zerotop.analysis.stats.exhaustion import BLOCK, Forecast, forecast_end, has_stopped
from zerotop.recording.moments.host_memory import measure_limit_bytes, measure_unreclaimable_bytes
from zerotop.recording.moments.records import Records
from zerotop.recording.samples import Floats, Ints, Rows, read_column
from zerotop.recording.steps.growable_array import GrowingArray
from zerotop.recording.steps.step_memory import measure_held_bytes
from zerotop_probe.recording.events import GpuProcess, RayMonitor

_KIND = FindingKind(
    name="host_memory_forecast",
    confidence=0.8,
    headline="The kernel will kill {victim} {when}: host memory runs out",
    details=(
        "{left_bytes:bytes} are left of {limit_name} of {limit_bytes:bytes}[, {swap_left_bytes:bytes} of them swap]. In"
        " {window_s:.0f} s it fell by {fallen_bytes:bytes}[: {growing} grew by {grown_bytes:bytes}][, of which"
        " {shared_bytes:bytes} are shared memory][, {pinned_bytes:bytes} pinned].[ Files in memory (/dev/shm, memfd) grew by"
        " {file_bytes:bytes}.][ DataLoader workers grew by {worker_bytes:bytes}.][ That is near step {last_step:.0f}.]"
    ),
    advice="Save a checkpoint before then[, and use less host memory: {less_host_memory}].",
    fix="{less_host_memory_fix}",
    explained_by=(Kinds(took_half_of_room, "host_growth"), Kinds(is_simultaneous, "host_growth", "loader_growth")),
)
_FILES_ADVICE = "Save a checkpoint before then. Files on /dev/shm and memfds stay in memory: delete them after use."
_RAY_HEADLINE = "Ray will kill a worker {when}: host memory runs out"
_OVER = _KIND.with_changes(
    severity=Severity.INFO,
    headline="Host memory grew by {fallen_bytes:bytes}, but no longer does",
    details="{left_bytes:bytes} are left of {limit_name} of {limit_bytes:bytes}.",
    advice="",
    fix="",
)
# A fall by less is nothing that kills: of the limit, and in bytes.
_LEAST_SHARE, _LEAST_BYTES = 0.005, 32 * MIB
# Ranks that grow by at least this share of the one that grows most are named with it.
_ALIKE = 0.5
# Share of the fall that must be the job's where others use the same memory, and share that is told apart.
_OWN_SHARE, _NOTABLE = 0.5, 0.2
# The kernel kills the largest process; one that is larger by this share is sure to be it.
_LARGER = 1.05
# A forecast is told again when so much of its time is left, or when it has become this much later.
_NEARER, _LATER = 0.5, 2.0
_SECOND = 10**9
# A rank, or the name of another process of the job.
Member = int | str


class _Told(NamedTuple):
    """The last forecast that was told of a rise."""

    begin_ns: int
    step: int | None
    ranks: tuple[int, ...]
    forecast: Forecast
    told_ns: int
    ray: RayMonitor | None


class _Check(NamedTuple):
    """What was told after so many seconds of training, and what still holds."""

    seconds: int
    told: _Told | None = None
    finding: Finding | None = None


_new_series = partial(GrowingArray, np.float64)


@in_each_node(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report a forecast, again when half of its time is over, and when memory no longer grows."""
    lead = window.subject.processes_on(window.host)[0]
    if len(lead.steps) > SETTLED_STEPS:
        left = window.keep(_new_series)  # of each second: a forecast and its news rest on all of them
        _add_seconds(left, lead)
        for check in window.extend(partial(_check_next, window.subject, lead, left.rows), 0):
            yield check.finding


def _find_begin(lead: Process) -> int:
    return int(lead.steps["end_unix_ns"][SETTLED_STEPS])


def _add_seconds(left: GrowingArray, lead: Process) -> None:
    """Extend the series to the last finished step: by then it is known which seconds belong to checkpoints."""
    before = len(left)
    done_ns = _find_begin(lead) + before * _SECOND
    count = (int(lead.steps["end_unix_ns"][-1]) - done_ns) // _SECOND
    if count <= 0:
        return
    samples = lead.at.records("hosts", lead.host).read_window(done_ns, done_ns + count * _SECOND)
    values = left.add_rows(count)
    if not len(samples):
        values[:] = np.nan
        return
    kept = samples.select(~_is_within_pause(lead, samples.times))
    ends = np.searchsorted(kept.times, done_ns + _SECOND * np.arange(1, count + 1), "right")
    known = left.rows[before - 1] if before else np.nan
    values[:] = np.concatenate([[known], _measure_left(kept.rows, _find_ray(lead))])[ends]


def _is_within_pause(lead: Process, times: Ints) -> Any:
    is_within = np.zeros(len(times), np.bool_)
    for name in ("eval", "checkpoint_save", "checkpoint_load"):
        phases = lead.read_rare_phases(name)
        if len(phases):
            at = np.searchsorted(phases.times, times)
            begins = np.append(lead.compute_begins(phases), np.iinfo(np.int64).max)
            is_within |= begins[at] <= times
    return is_within


def _find_ray(lead: Process) -> RayMonitor | None:
    """Return the memory monitor of Ray on the node of a rank, which kills before the kernel does."""
    found = (event for event in lead.at.events_of(RayMonitor) if event.writer.host == lead.host)
    return next((event for event in found if event.share is not None and event.unix_ns <= _find_begin(lead)), None)


def _measure_limits(rows: Rows, ray: RayMonitor | None) -> Floats:
    """Return the bytes in use from which on processes are killed, in records of HOSTS."""
    limits = np.asarray(measure_limit_bytes(rows), np.float64)
    if ray is None or ray.share is None:
        return limits
    return np.maximum(ray.share * limits, limits - ray.free_bytes if ray.free_bytes is not None else 0)


def _measure_left(rows: Rows, ray: RayMonitor | None) -> Floats:
    """Return the bytes left in records of HOSTS; NaN in recordings that do not tell the cache or the swap."""
    if not len(rows):
        return np.empty(0)
    swap, left = read_column(rows, "swap_left_bytes"), _measure_limits(rows, ray) - measure_unreclaimable_bytes(rows)
    return np.where(swap >= 0, left + (swap if ray is None else 0), np.nan)


def _check_next(group: Group, lead: Process, series: Floats, last: _Check | None) -> _Check | None:
    """Look at BLOCK more seconds; None while there are not so many."""
    count, told = (BLOCK, None) if last is None else (last.seconds + BLOCK, last.told)
    if count > len(series):
        return None
    left, host, now_ns = series[:count], lead.host, _find_begin(lead) + count * _SECOND
    if told is not None and has_stopped(left, told.forecast):
        return _Check(count, finding=_build_finding(_OVER, group, host, told, now_ns, left))
    forecast = forecast_end(left, _LEAST_BYTES)
    if forecast is None or (told is not None and not _is_news(told, forecast, now_ns)):
        return _Check(count, told)
    begin_ns = now_ns - forecast.window * _SECOND
    growth = _measure_growth(group, host, begin_ns, now_ns)
    row = group.lead.at.records("hosts", host).read_last(now_ns)
    limit = int(measure_limit_bytes(row))
    is_shared = limit >= int(row["memory_total_bytes"])
    if forecast.fallen < _LEAST_SHARE * limit or (is_shared and growth.total < _OWN_SHARE * forecast.fallen):
        return _Check(count, told)
    if told is None:
        told = _Told(begin_ns, group.step_at(begin_ns), group.ranks_on(host), forecast, now_ns, _find_ray(lead))
    told = told._replace(forecast=forecast, told_ns=now_ns)
    return _Check(count, told, _build_finding(_KIND, group, host, told, now_ns, left, growth))


def _is_news(told: _Told, forecast: Forecast, now_ns: int) -> bool:
    """Whether a forecast differs much from the last one that was told."""
    expected = told.forecast.expected
    passed = (now_ns - told.told_ns) / _SECOND
    return forecast.expected <= _NEARER * expected or forecast.expected >= _LATER * max(1.0, expected - passed)


class _Growth(NamedTuple):
    """Growth in a window, in bytes: of each process, of parts of the ranks', and of memory that is no process's."""

    processes: dict[Member, int]
    shared: int
    pinned: int
    files: int
    workers: int
    sizes: dict[Member, int]  # of each process, at the end

    @property
    def total(self) -> int:
        return sum(self.processes.values()) + self.files + self.workers


def _measure_growth(group: Group, host: str, begin_ns: int, end_ns: int) -> _Growth:
    grown: dict[Member, int] = {}
    sizes: dict[Member, int] = {}
    parts = dict.fromkeys(("shared_bytes", "pinned_bytes", "locked_bytes", "loader_private_bytes"), 0)
    for member, samples in _list_members(group, host, end_ns).items():
        before, after = (samples.read_last(time_ns) for time_ns in (begin_ns, end_ns))
        if before is None or after is None:
            continue
        sizes[member] = _measure_size(after)
        grown[member] = sizes[member] - _measure_size(before)
        for name in parts if isinstance(member, int) else ():
            parts[name] += _measure_change(before, after, name)
    first, last = (group.lead.at.records("hosts", host).read_last(time_ns) for time_ns in (begin_ns, end_ns))
    shared = parts["shared_bytes"]
    files = max(0, _measure_change(first, last, "shared_bytes") - max(0, shared)) if first is not None else 0
    pinned = max(parts["pinned_bytes"], parts["locked_bytes"])
    return _Growth(grown, shared, pinned, files, max(0, parts["loader_private_bytes"]), sizes)


def _list_members(group: Group, host: str, known_ns: int) -> dict[Member, Records]:
    """Return the samples of the job's processes on a node: its ranks, and engines that use its GPUs."""
    members: dict[Member, Records] = {process.rank: process.host_samples for process in group.processes_on(host)}
    ranks = {process.source.pid for process in group.processes_on(host)}
    for event in group.lead.at.events_of(GpuProcess):
        if event.of_job and event.writer.host == host and event.pid not in ranks and event.unix_ns <= known_ns:
            members[name_process(event)] = group.lead.at.records("processes", host, "pid", event.pid)
    return members


def _measure_size(row: Any) -> int:
    return int(measure_held_bytes(row)) + max(0, int(row["swap_bytes"]))


def _measure_change(before: Any, after: Any, name: str) -> int:
    known = name in (after.dtype.names or ()) and min(int(before[name]), int(after[name])) >= 0
    return int(after[name]) - int(before[name]) if known else 0


def _build_finding(
    kind: FindingKind,
    group: Group,
    host: str,
    told: _Told,
    now_ns: int,
    left: Floats,
    growth: _Growth | None = None,
) -> Finding:
    """Return a forecast, or without ``growth`` the finding that it no longer holds."""
    row, forecast = group.lead.at.records("hosts", host).read_last(now_ns), told.forecast
    evidence: dict[str, float | None] = {
        "left_bytes": float(left[-1]),
        "limit_bytes": float(_measure_limits(row, told.ray)),
        "fallen_bytes": forecast.fallen,
        "swap_left_bytes": (float(row["swap_left_bytes"]) or None) if told.ray is None else None,
    }
    limit_name = _name_limit(row, host) if told.ray is None else "Ray's limit"
    values: dict[str, Any] = {"limit_name": limit_name, "when": describe_wait(forecast)}
    values |= name_savings(group.processes_on(host), now_ns)
    if growth is not None:
        kind = kind.with_changes(headline=_RAY_HEADLINE) if told.ray is not None else kind
        more, container = _describe_growth(group, growth, forecast, now_ns)
        values |= more
        evidence |= {
            "window_s": forecast.window,
            "expected_s": forecast.expected,
            "soonest_s": forecast.soonest,
            "latest_s": forecast.latest,
            "last_step": _find_last_step(group, now_ns, forecast),
        }
        if growth.files > _OWN_SHARE * forecast.fallen:
            kind = kind.with_changes(advice=_FILES_ADVICE, fix="ls -lS /dev/shm")
        elif container is not None:
            kind = container.name_in(kind)
            kind = kind.with_changes(advice=f"Save a checkpoint before then. {kind.advice}")
            values |= container.values
    ends = group.processes_on(host)[0].steps["end_unix_ns"]
    known_ns = int(ends[np.searchsorted(ends, now_ns)])  # until then it was not known what belongs to a checkpoint
    return kind.at(group, told.begin_ns, now_ns, evidence, known_ns=known_ns, ranks=told.ranks, step=told.step, **values)


def _name_limit(row: Any, host: str) -> str:
    is_confined = 0 < int(row["cgroup_limit_bytes"]) < int(row["memory_total_bytes"])
    return "the control group's limit" if is_confined else f"{host}'s memory"


def _describe_growth(
    group: Group, growth: _Growth, forecast: Forecast, now_ns: int
) -> tuple[dict[str, Any], GrowingContainer | None]:
    """Return who grows and who will be killed, and the container that grows."""
    least = _NOTABLE * forecast.fallen
    most = max(growth.processes.values(), default=0)
    growing = [one for one, grown in growth.processes.items() if grown >= max(_ALIKE * most, least)]
    ends = {one: size + growth.processes[one] / forecast.window * forecast.expected for one, size in growth.sizes.items()}
    grown = sum(growth.processes[one] for one in growing)
    found = [find_container(process, now_ns) for process in group.processes if process.rank in growing]
    return {
        "victim": _name_victim(ends),
        "growing": _name_members(growing) or None,
        "grown_bytes": grown if growing else None,
        "shared_bytes": growth.shared if growing and growth.shared > _NOTABLE * grown else None,
        "pinned_bytes": growth.pinned if growing and growth.pinned > _NOTABLE * grown else None,
        "file_bytes": growth.files if growth.files > least else None,
        "worker_bytes": growth.workers if growth.workers > least else None,
    }, next((one for one in found if one is not None), None)


def _name_members(members: Sequence[Member]) -> str:
    ranks = [one for one in members if isinstance(one, int)]
    others = [one for one in members if isinstance(one, str)]
    return join_words([*([format_ranks(ranks)] if ranks else []), *others])


def _name_victim(sizes: dict[Member, float]) -> str:
    largest = sorted(sizes, key=lambda one: -sizes[one])
    if len(largest) == 1 or (len(largest) > 1 and sizes[largest[0]] > _LARGER * sizes[largest[1]]):
        return _name_members(largest[:1]).partition(" (")[0]
    return "a process" if any(isinstance(one, str) for one in largest[:2]) else "a rank"


def _find_last_step(group: Group, now_ns: int, forecast: Forecast) -> float | None:
    steps = group.lead.steps_until(now_ns)
    recent = steps[steps["end_unix_ns"] > now_ns - forecast.window * _SECOND]
    if not len(recent):
        return None
    return float(steps["step"][-1]) + forecast.expected * len(recent) / forecast.window


def describe_wait(forecast: Forecast) -> str:
    """Return ``in about 40 minutes``, or ``in 30 to 60 minutes`` where it is not sure."""
    times: Sequence[float] = (forecast.expected,) if forecast.is_even else (forecast.soonest, forecast.latest)
    unit, seconds = next((one for one in _UNITS if times[0] >= one[1] * 2), _UNITS[-1])
    first, *others = (_round_time(time / seconds) for time in times)
    return f"in {first:g} to {others[0]:g} {unit}" if others and others[0] > first else f"in about {first:g} {unit}"


_UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))


def _round_time(time: float) -> float:
    """Round to what is known of it: 7, 15, 40."""
    return max(1, round(time) if time < 10 else 5 * round(time / 5))
