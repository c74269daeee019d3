"""Changes on the lead rank's node at the moment when the iteration time changed: cores, paging, clocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support.causes.step_change import Advice, Cause, StepChange
from zerotop.analysis.findings.support.evidence import Process, Rows, Samples
from zerotop.analysis.findings.support.host_load import (
    CoreLoad,
    count_children,
    count_workers,
    measure_load,
    measure_usual_use,
    measure_worker_cores,
)
from zerotop.analysis.findings.support.started_processes import STARTED, find_start_of_processes
from zerotop.analysis.findings.support.started_threads import ADVICE, FEWEST_ALIKE, count_alike, find_started_threads
from zerotop.analysis.findings.support.thresholds import TAKEN_SHARE
from zerotop.analysis.formatting import Text, format_count
from zerotop.analysis.hangs.stacks import StackFrame
from zerotop.recording.samples import read_column

# Major page faults of a rank in a second: each waits for the disk for 0.1 ms at the least. A few always occur.
_FAULTS_PER_S, _FEW_FAULTS_PER_S = 100.0, 10.0
# If others begin to use this share of the cores, they are the reason why ranks wait for cores.
_MOST_TAKEN_SHARE = 0.5
# Ranks that get at most this share of their earlier cores are slowed by it, whatever others used before.
_LESS_SHARE = 1 / 3
# Ranks with fewer cores by this factor may be slowed by it, if iterations become longer by about the same factor.
_FEWER_TIMES, _ABOUT_TIMES = 1.25, 1.3
# A smaller drop of the clock is usual variation.
_CORE_CLOCK_SHARE = 0.15
# If ranks wait for cores, and get as many as before, iterations vary by up to this factor.
_MOST_NOISE = 2.0
# A team of threads takes up to this many times as long as its average thread where others use the cores.
_LAST_THREAD_TIMES = 1.5
# The time of a few samples of a node's cores (ns), which are taken twice a second.
_SAMPLED_NS = 1_700_000_000
# Too few cores make work longer by at most this factor. Work that takes less than these seconds counts as that long.
_MOST_STRETCH, _SHORT_S = 5.0, 0.001

# A thread that computes so many times as long in each iteration, by this share of it, has more to do: on a core that is
# shared with others, or slower, it computed up to 1.2 times as long.
_COMPUTING_TIMES, _COMPUTING_SHARE = 1.4, 0.1
# Of a change: the least that waits for a core, and the most that computing makes up where it is only these.
_WAITED_SHARE, _COMPUTED_SHARE = 0.75, 0.25

_CORES: Advice = ("Give each rank cores of its own, and as many threads as it has cores.", "{own_cores_fix}")
_OTHERS: Advice = ("See what runs beside the job: the ranks wait for cores.", "top -b -n 1 -o %CPU | head -20")
FEWER_WORKERS: Advice = (
    "Give the job more cores, or start fewer workers: they take the ranks' cores.",
    "{fewer_workers_fix}",
)
_PAGING: Advice = ("Use less host memory: {less_host_memory}.", "{less_host_memory_fix}")
_CORE_CLOCK: Advice = ("Check the node's cooling and its CPU frequency governor.", "cpupower frequency-info")


def check_crowding(change: StepChange) -> Cause | None:
    samples = change.read_usual_samples(change.process.host_samples)
    if samples is None:
        return None
    before, after = (float(np.nan_to_num(part.rows["waiting_cores"]).mean()) for part in samples)
    if after < 1 or after < 2 * before or _is_new_work(change):
        return None
    started, ranks = find_started_threads(*samples), len(change.group.processes_on(change.process.host))
    if started is not None and count_alike(change.process, change.latest_ns) >= FEWEST_ALIKE:
        return None  # Python's own threads, which torch.set_num_threads() does not change
    if started is not None:
        text = f"the rank has {started.after} threads instead of {started.before}, and {after:.1f} of them wait for cores"
        return Cause(text, ADVICE, started.build_fix(change.process, ranks), 0.8, finding="crowded_cores")
    text = f"threads of the rank waited for {after:.1f} cores instead of {before:.1f}"
    load_before, load = measure_change_loads(change)
    if load is not None and load.is_disturbed:
        taker = _find_taker(change, load_before, load)
        text += f", as {taker.who} used {taker.after:.1f} of {load.cores}"
        return Cause(text, *taker.advice, 0.7, finding="cores_taken", is_host=True)
    return Cause(text, *_CORES, 0.7, finding="crowded_cores", is_host=True)


def measure_change_loads(change: StepChange) -> tuple[CoreLoad | None, CoreLoad | None]:
    """Return the load of the lead's node before and after. If steps are short, samples around them count too."""
    before, after = (measure_load(change.process.recording, change.process.host, *one) for one in _list_windows(change))
    return before, after


def _list_windows(change: StepChange) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the begin and end of the time before and after a change in which the node's samples count."""
    changed_ns, until_ns = int(change.after["begin_unix_ns"][0]), int(change.before["end_unix_ns"][-1])
    before_ns = min(int(change.before["begin_unix_ns"][0]), until_ns - _SAMPLED_NS)
    after_ns = max(int(change.after["end_unix_ns"][-1]), min(change.known_ns, changed_ns + _SAMPLED_NS))
    return (before_ns, until_ns), (changed_ns, after_ns)


class _Taker(NamedTuple):
    """Processes beside the ranks, and the cores that they used before and after a change."""

    who: str
    before: float
    after: float
    advice: Advice


def _find_taker(change: StepChange, before: CoreLoad | None, after: CoreLoad) -> _Taker:
    """Return whose use of cores rose most: that of the job's own workers, of what it has started, or of others."""
    processes, windows = change.group.processes_on(change.process.host), _list_windows(change)
    workers, (children, child_cores) = count_workers(processes, *windows[1]), count_children(processes, *windows[1])
    totals = before.others if before is not None else 0.0, after.others
    start = find_start_of_processes(change.process, int(change.after["step"][0]), change.latest_ns)
    if start is not None and np.isnan(child_cores):
        return _Taker(f"processes that the job had started at {start.place}", *totals, _advise_fewer(start))
    own = [measure_worker_cores(processes, *window) for window in windows]
    started = [float(np.nan_to_num(cores)) for cores in (count_children(processes, *windows[0])[1], child_cores)]
    own, started = ([min(*both) for both in zip(part, totals, strict=True)] for part in (own, started))
    strange = [max(0.0, total - sum(parts)) for total, *parts in zip(totals, own, started, strict=True)]
    place = f" at {start.place}" if start is not None else ""
    return max(
        _Taker("other processes", strange[0], strange[1], _OTHERS),
        _Taker(f"its {format_count(workers, 'DataLoader worker')}", own[0], own[1], FEWER_WORKERS),
        _Taker(
            f"{format_count(children, 'process')} that the job had started{place}",
            started[0],
            started[1],
            _advise_fewer(start),
        ),
        key=lambda taker: taker.after - taker.before,
    )


def _advise_fewer(start: StackFrame | None) -> Advice:
    return (STARTED, f"{start.file}:{start.line}") if start is not None else (STARTED, _OTHERS[1])


def find_shortage(change: StepChange) -> float:
    """Return the factor by which work takes longer after a change because the ranks lack cores; 1 if they do not."""
    begin_ns, end_ns = int(change.after["begin_unix_ns"][0]), change.latest_ns
    loads = (measure_load(change.process.recording, host, begin_ns, end_ns) for host in change.group.hosts)
    short = (load for load in loads if load is not None and load.lacks_cores)
    return max((load.wanted / max(load.ranks, 1e-6) for load in short), default=1.0)


def computes_longer(change: StepChange) -> bool:
    """Whether the lead's first thread computes longer in each iteration, which others on its core cannot cause.

    It may compute in evaluations and checkpoints, too, which are no part of the iterations.
    """
    before, after = (measure_usual_use(change.process, rows, change.latest_ns) for rows in (change.before, change.after))
    if before is None or after is None:
        return False
    apart = [float(np.mean(rows["eval_s"] + rows["checkpoint_s"])) for rows in (change.before, change.after)]
    computed = after.computed - max(0.0, apart[1] - apart[0])
    added_s = computed - before.computed
    return added_s >= _COMPUTING_SHARE * change.before_s and computed >= _COMPUTING_TIMES * before.computed


def waits_longer(process: Process, before: Rows, after: Rows, added_s: float, known_ns: int) -> bool:
    """Whether iterations became longer (by ``added_s``) as the first thread waits for a core, and computes no longer."""
    uses = [measure_usual_use(process, rows, known_ns) for rows in (before, after) if len(rows)]
    if len(uses) < 2 or uses[0] is None or uses[1] is None:
        return False
    waited, computed = uses[1].waited - uses[0].waited, uses[1].computed - uses[0].computed
    return waited >= _WAITED_SHARE * added_s > 0 and computed <= _COMPUTED_SHARE * added_s


def is_by_others(change: StepChange) -> bool:
    """Whether other processes on the cores may be the reason, because the phases that compute vary then."""
    before, after = change.before_s, change.after_s
    own_before, own_after = change.measure_own()
    is_own = (own_after - own_before) / (after - before) > 0.5  # false where it is unknown, which is NaN
    loads = [load for load in measure_change_loads(change) if load is not None]
    is_noise = not is_own and may_be_noise(before, after, loads, float(change.before["iteration_s"].max()))
    return is_noise and not computes_longer(change)


def may_be_noise(before_s: float, after_s: float, loads: Sequence[CoreLoad], longest_s: float = 0.0) -> bool:
    """Whether the change of the iteration time may only come from other processes on the cores.

    ``loads``: before and after. ``longest_s``: the longest iteration before.
    """
    if not any(load.is_disturbed for load in loads):
        return False
    if before_s < after_s <= longest_s and loads[0].is_disturbed:
        return True
    fewer = loads[0].ranks / max(loads[-1].ranks, 1e-6)
    slower, fewer = (after_s / before_s, fewer) if after_s > before_s else (before_s / after_s, 1 / max(fewer, 1e-6))
    # If ranks get a sixth of the cores that they want, an iteration may take six times as long as without others, and
    # longer where all threads of a team wait for the last one.
    stretch = _LAST_THREAD_TIMES * max(load.wanted / max(load.ranks, 1e-6) for load in loads)
    return bool(slower <= max(_MOST_NOISE * max(1.0, fewer), stretch))


def check_others(change: StepChange) -> Cause | None:
    before, after = measure_change_loads(change)
    if before is None or after is None or _is_new_work(change):
        return None
    risen = (after.others - before.others) / after.cores
    taker = _find_taker(change, before, after)
    used = f"{taker.who} used {taker.after:.1f} of {format_count(after.cores, 'core')} instead of {taker.before:.1f}"
    fewer = f"the ranks got {after.ranks:.2f} cores instead of {before.ranks:.2f}"
    if after.is_starved and risen >= TAKEN_SHARE:
        text = used
    elif after.is_starved and after.ranks <= _LESS_SHARE * before.ranks and after.others >= before.others:
        # More processes share the cores.
        text = f"{fewer}, as {taker.who} used {taker.after:.1f}"
    elif after.is_disturbed and not before.is_disturbed and risen > 0 and _is_explained_by_cores(change, before, after):
        text = f"{fewer}, as {taker.who} used {taker.after:.1f} of {after.cores} instead of {taker.before:.1f}"
    elif after.lacks_cores and not before.is_disturbed and risen >= _MOST_TAKEN_SHARE:
        text = used
    else:
        return None
    return Cause(text, *taker.advice, 0.8, finding="cores_taken")


def _is_explained_by_cores(change: StepChange, before: CoreLoad, after: CoreLoad) -> bool:
    """Whether iterations became longer by about the factor by which the ranks got fewer cores."""
    slower = change.after_s / change.before_s
    fewer = before.ranks / max(after.ranks, 1e-6)
    return bool(fewer >= _FEWER_TIMES and 1 / _ABOUT_TIMES <= slower / fewer <= _ABOUT_TIMES)


def check_paging(change: StepChange) -> Cause | None:
    """Return the cause that the lead began to wait for pages from swap or from a file."""
    samples = change.read_samples(change.process.host_samples)
    if samples is None:
        return None
    after = _measure_rate(samples[1], "major_faults")
    # Unknown figures are NaN, which compares false.
    if not (after >= _FAULTS_PER_S and _measure_rate(samples[0], "major_faults") <= _FEW_FAULTS_PER_S):
        return None
    hosts = change.read_samples(change.process.at.records("hosts", change.process.host))
    rate = _measure_rate(hosts[1], "swap_in_bytes") if hosts is not None else float("nan")
    values = {"faults": after, "rate": rate if rate > 0 else None}
    text = Text("the lead rank waits for {faults:.0f} pages a second[, and {rate:bytes} a second come from swap]", values)
    return Cause(text, *_PAGING, 0.8, finding="swapping")


def _is_new_work(change: StepChange) -> bool:
    """Whether most of the change is new work outside the phases that compute.

    Too few cores stretch the existing work by some factor, but add none.
    """
    before, after = change.measure_own()  # a comparison with NaN, for unknown, is false
    return after - before > change.added_s / 2 > 0 and after > _MOST_STRETCH * max(before, _SHORT_S)


def _measure_rate(part: Samples, column: str) -> float:
    """Return the growth of a counter per second; NaN if it is unknown."""
    values = read_column(part.rows, column)
    is_known = values >= 0
    values, times = values[is_known], part.times[is_known]
    if len(values) < 2 or times[-1] <= times[0]:
        return float("nan")
    return float(values[-1] - values[0]) / (int(times[-1] - times[0]) / 1e9)


def check_core_clock(change: StepChange) -> Cause | None:
    """Return the cause that the clock of the node's cores fell."""
    samples = change.read_samples(change.process.at.records("hosts", change.process.host))
    if samples is None:
        return None
    before, after = (float(np.median(read_column(part.rows, "cpu_mhz"))) for part in samples)
    if not after < (1 - _CORE_CLOCK_SHARE) * before:
        return None
    return Cause(f"the clock of the node's cores fell from {before:.0f} to {after:.0f} MHz", *_CORE_CLOCK, 0.6)
