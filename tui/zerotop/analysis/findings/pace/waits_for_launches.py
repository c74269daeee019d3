"""The CPU sets the pace: the GPU waits for launches. And iterations whose level goes up and down while nothing changes.

It looks at the findings of the other detectors of the pace, and so has to come after them: they run in the order of names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.code_line import CodeLine
from zerotop.analysis.engine import LOOP
from zerotop.analysis.findings.support.evidence import Floats, Group, Process, Rows
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.analysis.findings.support.gpu_use import measure_gpu_use, measure_use_in_steps, offloads
from zerotop.analysis.findings.support.host_load import measure_load
from zerotop.analysis.findings.support.lines.forward_lines import find_forward_line
from zerotop.analysis.findings.support.lines.line_findings import measure_between
from zerotop.analysis.findings.support.lines.stack_lines import runs_modules
from zerotop.analysis.findings.support.mode_uses import lacks_cache, launches_block
from zerotop.analysis.findings.support.window import SearchWindow, in_each_attempt
from zerotop.analysis.formatting import Text
from zerotop.analysis.script_terms import read_terms
from zerotop.analysis.stats.medians import compute_known_median
from zerotop.analysis.stats.wander import BLOCK, compute_levels, find_split, measure_order
from zerotop_probe.recording.events import EngineOptimizer, OutOfMemory

_LAUNCHES = FindingKind(
    name="launch_bound",
    severity=Severity.INFO,
    confidence=0.85,
    headline="The GPU waits for launches {share:percent} of the time in steps {first_step:.0f} to {last_step:.0f}",
    details=(
        "{these} take {iteration_s:seconds}. Kernels run in {use:percent} of the time; in the rest the GPU waits"
        " for the next launch, with which {cores:.1f} cores are busy.[ In forward, most of the time goes to"
        " {line}.][ Iterations wander from {low_s:seconds} to {high_s:seconds} with the pace of those cores.]"
    ),
    advice="{help}",
    fix="{help_fix}",
    costs_other_steps=True,
)
_ENDED = _LAUNCHES.with_changes(
    headline="The GPU waited for launches {share:percent} of the time up to step {until_step:.0f}"
)
_WANDERS = FindingKind(
    name="pace_wanders",
    severity=Severity.INFO,
    confidence=0.8,
    headline="Iterations wander from {low_s:seconds} to {high_s:seconds} between steps {first_step} and {last_step}",
    details="Their median is {iteration_s:seconds}; changes of pace within this range are not told.",
)
# Findings of other reasons for idle GPUs: their steps are not those of launches, from this share of the time on.
_OTHER_REASONS = "data_stall", "repeated_pause", "steps_in_turn", "time_lost_in_line"
_EXPLAINED_SHARE = 0.15
# The first steps load and allocate, and are recorded in full.
_FIRST_STEPS = 20
# Steps and seconds after these with which the pace is judged first; then with each doubling of the steps.
_LEAST_STEPS, _LEAST_S = 60, 3.0
# The GPU waits for at least this share of the iteration.
_WAIT_SHARE = 0.2
# Shares of the iteration that other reasons take, and the cores that launch.
_MOST_DATA, _MOST_BETWEEN, _LEAST_CORES = 0.1, 0.25, 0.6
# By which factor the time between the phases may have grown since the first steps, if it is longer than that.
_GROWN_TIMES = 1.5
# If the mean is larger than the median by this factor, pauses leave the GPU idle, too.
_PAUSING_TIMES = 1.2
# Launches take about as long in each step: where quarters of the steps differ by this factor, something else takes the time.
_DIFFERING_TIMES = 2.0
# Levels that wander: their range, as a share of the median, and how often they cross it: a change that ends does so twice.
_WANDER_SHARE, _CROSSINGS = 0.25, 3
# Levels on each side of a change for good, and the share of their pairs that are in the same order.
_LEAST_LEVELS, _CHANGED_SHARE = 3, 0.95
# Memory that is left over: a larger micro-batch may fit.
_ROOM_SHARE = 0.6
# Memory that grows in the judged steps by this share of the GPU's will fill the room by itself.
_GROWN_SHARE = 0.05
# Sizes of micro-batches, each of which CUDA graphs capture anew.
_MOST_SHAPES = 4
# The optimizers of PyTorch that have a fused update.
_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}


class _Pace(NamedTuple):
    """The pace of recent steps."""

    rows: Rows
    use: float  # of the GPUs, a share of the time
    cores: float
    low_s: float
    middle_s: float
    high_s: float
    wanders: bool
    wandering: Rows  # the steps of these three


class _Verdict(NamedTuple):
    """The pace of the first steps, judged each time that there are twice as many."""

    steps: int
    finding: Finding | None
    launching: dict[str, Any] | None  # the values and cost of the finding that says so; None if the GPU waits for nothing
    known_ns: int
    offers_rows: bool  # its advice is to train on more rows


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report both once for each attempt, with the numbers of the latest steps, and the end of the first."""
    full_ns = _find_full(window)
    for verdict in window.extend(partial(_judge_next, window.subject, full_ns), 0):
        yield verdict.finding


def _find_full(window: SearchWindow[Group]) -> int | None:
    """Return when memory left no room for more rows, or ran out, for the first time; None if it has not."""
    group, lead = window.subject, window.subject.lead
    fresh, room = window.records(lead.records("allocator")), _ROOM_SHARE * (lead.device_bytes or np.inf)

    def find_filled() -> int | None:
        if not len(fresh):
            return None
        is_full = np.maximum(fresh.rows["reserved_bytes"], fresh.rows["reserved_peak_bytes"]) > room
        return int(fresh.times[np.argmax(is_full)]) if is_full.any() else None

    times = [event.unix_ns for one in group.processes for event in one.events_of(OutOfMemory)[:1]]
    filled = window.find_once(find_filled, "filled")
    return min(times if filled is None else [*times, filled], default=None)


def _judge_next(group: Group, full_ns: int | None, before: _Verdict | None) -> _Verdict | None:
    steps = group.lead.steps
    if before is not None:
        next_ns = int(steps["end_unix_ns"][2 * before.steps - 1]) if len(steps) >= 2 * before.steps else math.inf
        other = _find_other_reason(group, group.lead.at.cursor_ns) if before.launching is not None else None
        if other is not None and before.launching is not None and before.known_ns < other.known_ns <= next_ns:
            return _end_before(group, before, before.launching, other)
        if before.offers_rows and full_ns is not None and full_ns <= next_ns:  # its advice is wrong from then on
            known_ns = max(full_ns, before.known_ns)
            return _judge_pace(group, steps[: before.steps], before.launching, full_ns, known_ns=known_ns)
    due = 2 * before.steps if before is not None else _FIRST_STEPS + _LEAST_STEPS
    while len(steps) >= due:
        if int(steps["end_unix_ns"][due - 1]) - int(steps["end_unix_ns"][_FIRST_STEPS]) >= _LEAST_S * 1e9:
            return _judge_pace(group, steps[:due], before.launching if before is not None else None, full_ns)
        due += _LEAST_STEPS
    return None


def _find_other_reason(group: Group, known_ns: int) -> Finding | None:
    """Return the finding of another reason for which the GPU is idle: the steps since its first one wait for that, too."""
    reasons = [
        one
        for one in group.findings
        if one.name in _OTHER_REASONS
        and one.severity is Severity.WARNING
        and one.cost >= _EXPLAINED_SHARE
        and one.step is not None
        and one.known_ns <= known_ns
    ]
    return min(reasons, key=lambda one: one.known_ns, default=None)


def _end_before(group: Group, before: _Verdict, launching: dict[str, Any], other: Finding) -> _Verdict:
    """Return the end of the finding, with the numbers of the steps before those that another reason explains."""
    steps = group.lead.steps
    begin = steps[_FIRST_STEPS : before.steps]
    evidence, values, cost = launching["evidence"], launching["values"], launching["cost"]
    until_step = min(values["last_step"], (other.step or 0) - 1)
    rows = begin[begin["step"] <= until_step]
    if len(rows):
        pace = _measure_pace(group, rows[len(rows) // 2 :])
        numbers = {"iteration_s": compute_known_median(pace.rows["iteration_s"]), "steps": len(pace.rows)}
        numbers |= {"share": 1 - pace.use, "use": pace.use, "cores": pace.cores, "first_step": float(pace.rows["step"][0])}
        these = f"Steps {int(pace.rows['step'][0])} to {until_step}"
        evidence, values = evidence | numbers, values | numbers | {"these": these}
        cost = _measure_waits(group, rows)
    until: dict[str, Any] = {"until_step": until_step}
    found = _ENDED.at_steps(group, begin, evidence | until, known_ns=other.known_ns, cost=cost, **values | until)
    return _Verdict(before.steps, found, None, other.known_ns, offers_rows=False)


def _judge_pace(
    group: Group, steps: Rows, launching: dict[str, Any] | None, full_ns: int | None, *, known_ns: int | None = None
) -> _Verdict:
    """Judge the latter half of some steps. ``launching``: the values of the finding about those before.

    ``full_ns``: when memory was full for the first time. ``known_ns``: when all this was known, [the end of the steps].
    """
    pace = _measure_pace(group, steps[max(_FIRST_STEPS, len(steps) // 2) :])
    begin, end_ns = steps[_FIRST_STEPS:], int(steps["end_unix_ns"][-1])
    known_ns = end_ns if known_ns is None else known_ns
    has_room = full_ns is None or full_ns > known_ns
    line = find_forward_line(group.lead, known_ns)
    advice = _advise(group, pace, line, has_room=has_room)
    evidence: dict[str, float] = {"iteration_s": compute_known_median(pace.rows["iteration_s"]), "steps": len(pace.rows)}
    if pace.wanders:
        evidence |= {"low_s": pace.low_s, "high_s": pace.high_s}
    other = _find_other_reason(group, known_ns)
    if other is None and _is_launch_bound(group, pace):
        evidence |= {"share": 1 - pace.use, "use": pace.use, "cores": pace.cores}
        evidence |= {"first_step": float(pace.rows["step"][0])}
        values = {
            "low_s": None,
            "high_s": None,
            "these": "These steps",
            "last_step": int(pace.rows["step"][-1]),
            **advice.texts,
            "line": line.text if line else None,
        }
        cost = _measure_waits(group, begin)
        found = _LAUNCHES.at_steps(group, begin, evidence, known_ns=known_ns, cost=cost, **evidence | values)
        told = {"evidence": evidence, "values": evidence | values, "cost": cost}
        return _Verdict(len(steps), found, told, known_ns, advice.offers_rows)
    if launching is not None:
        until = {"until_step": launching["values"]["last_step"]}
        # The headline names no first step: the figures are of the last steps in which that was so.
        these = {"these": f"Steps {launching['values']['first_step']:.0f} to {until['until_step']}"}
        values = launching["values"] | until | these | ({} if has_room else advice.texts)
        evidence = launching["evidence"] | until
        found = _ENDED.at_steps(group, begin, evidence, known_ns=known_ns, cost=launching["cost"], **values)
        return _Verdict(len(steps), found, None, known_ns, offers_rows=False)
    wanders = pace.wanders and other is None and not _is_disturbed(group, pace.rows)
    wandering = _describe_wandering(group, begin, pace, known_ns) if wanders else None
    return _Verdict(len(steps), wandering, None, known_ns, offers_rows=False)


def _describe_wandering(group: Group, begin: Rows, pace: _Pace, known_ns: int) -> Finding:
    steps = pace.wandering["step"]
    evidence = {"iteration_s": pace.middle_s, "low_s": pace.low_s, "high_s": pace.high_s}
    ends = {"first_step": int(steps[0]), "last_step": int(steps[-1])}
    return _WANDERS.at_steps(group, begin, evidence, known_ns=known_ns, **ends)


def _is_disturbed(group: Group, rows: Rows) -> bool:
    """Whether other processes take cores from the ranks, which is told already."""
    window = int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])
    loads = (measure_load(group.lead.recording, host, *window) for host in group.hosts)
    return any(load is not None and load.is_disturbed for load in loads)


def _measure_pace(group: Group, rows: Rows) -> _Pace:
    begin_ns, end_ns = int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])
    cores = [_measure_cores(one, begin_ns, end_ns) for one in group.processes]
    known = rows[~np.isnan(rows["iteration_s"])]
    levels = compute_levels(np.asarray(known["iteration_s"], np.float64))
    unchanged = _find_unchanged(levels)
    levels, wandering = levels[unchanged], known[unchanged.start * BLOCK : unchanged.stop * BLOCK]
    low, middle, high = np.percentile(levels, (5, 50, 95)).tolist()
    is_above = levels[np.abs(levels - middle) >= _WANDER_SHARE / 4 * middle] > middle
    crossings = int(np.count_nonzero(np.diff(is_above)))
    wanders = high - low >= _WANDER_SHARE * middle and crossings >= _CROSSINGS
    use = _measure_use(group, begin_ns, end_ns)
    return _Pace(rows, use, float(np.mean(cores)), low, middle, high, wanders, wandering)


def _measure_use(group: Group, begin_ns: int, end_ns: int) -> float:
    return float(np.mean([measure_gpu_use(one, begin_ns, end_ns) for one in group.processes]))


def _measure_waits(group: Group, rows: Rows) -> float:
    """Return the share of the time of some steps in which the GPUs were idle; it may differ between parts of them."""
    return 1 - float(np.mean([measure_use_in_steps(one, rows, np.mean) for one in group.processes]))


def _find_unchanged(levels: Floats) -> slice:
    """Return the levels on one side of the last change for good, which are those after it if they are enough to judge."""
    for split in range(len(levels) - 1, 0, -1):
        before, after = levels[:split], levels[split:]
        if _is_change(before, after):
            return slice(split, len(levels)) if len(after) >= _LEAST_LEVELS else slice(0, split)
    if len(levels) < 2 * _LEAST_LEVELS:
        return slice(0, len(levels))
    split = find_split(levels, _LEAST_LEVELS)
    order = measure_order(levels[:split], levels[split:])
    return slice(split if max(order, 1 - order) >= _CHANGED_SHARE else 0, len(levels))


def _is_change(before: Floats, after: Floats) -> bool:
    """Whether all levels on one side are above those on the other, by more than both sides wander."""
    is_apart = after.min() > before.max() or after.max() < before.min()
    return bool(is_apart and abs(np.median(after) - np.median(before)) >= 2 * max(np.ptp(before), np.ptp(after)))


def _measure_cores(process: Process, begin_ns: int, end_ns: int) -> float:
    """Return the cores that the threads of a rank use that launch: its first one, and autograd's. NaN if not sampled.

    The other threads, such as those of gloo, which adds up gradients on the CPU, launch nothing for the GPU.
    """
    samples = process.at.records("threads", process.host, "pid", process.source.pid).read_window(begin_ns, end_ns)
    if not len(samples):
        return float("nan")
    is_launching = (samples.rows["tid"] == process.source.pid) | np.char.startswith(samples.rows["name"], b"pt_autograd")
    each = [
        samples.rows["cores_used"][is_launching & (samples.rows["tid"] == tid)] for tid in np.unique(samples.rows["tid"])
    ]
    # Only the busiest threads are recorded: one without samples most of the time was not among them.
    cores = [float(np.nanmedian(one)) for one in each if not np.isnan(one).all()]
    return sum(cores) if cores else float("nan")


def _is_launch_bound(group: Group, pace: _Pace) -> bool:
    """Whether the GPUs are idle because the ranks compute what to launch; comparisons with NaN, for unknown, are false."""
    if any(launches_block(one) or lacks_cache(one) for one in group.processes):  # a reason of its own, see costly_variables
        return False
    if not (1 - pace.use >= _WAIT_SHARE and pace.cores >= _LEAST_CORES) or any(map(offloads, group.processes)):
        return False
    seconds = pace.rows["iteration_s"]
    has_pauses = float(np.nanmean(seconds)) >= _PAUSING_TIMES * compute_known_median(seconds)
    quick, slow = np.nanpercentile(seconds, (25, 75))
    return (
        not has_pauses and slow <= _DIFFERING_TIMES * quick and all(_is_launching(one, pace.rows) for one in group.processes)
    )


def _is_launching(process: Process, steps: Rows) -> bool:
    """Whether a rank's time goes into its phases, and its GPU finishes each as soon as the host does."""
    rows = process.phased_steps_until(int(steps["end_unix_ns"][-1]))
    rows = rows[rows["step"] >= steps["step"][0]]
    rows = rows if len(rows) else process.phased_steps_until(int(steps["end_unix_ns"][-1]))[-_FIRST_STEPS:]
    iteration = compute_known_median(rows["iteration_s"])
    data, between = compute_known_median(rows["data_s"]), compute_known_median(measure_between(rows))
    if data > _MOST_DATA * iteration:
        return False
    if between <= _MOST_BETWEEN * iteration:
        return True
    # A model may run between the phases, too, from the begin on: to generate, for example.
    first = process.phased_steps[:_FIRST_STEPS]
    if between > _GROWN_TIMES * compute_known_median(measure_between(first)):
        return False
    return runs_modules(process, int(steps["begin_unix_ns"][0]), int(steps["end_unix_ns"][-1]))


def read_held(process: Process, steps: Rows) -> tuple[int, int]:
    """Return the most memory that PyTorch reserved in some steps, and in which of them it was read last."""
    peaks, begins = steps["reserved_peak_bytes"], steps["begin_unix_ns"]
    samples = process.records("allocator").read_window(int(begins[0]), int(steps["end_unix_ns"][-1]))
    held, last = int(peaks.max(initial=0)), max([0, *np.flatnonzero(peaks > 0)[-1:].tolist()])
    if len(samples):
        held = max(held, *(int(samples.rows[name].max()) for name in ("reserved_bytes", "reserved_peak_bytes")))
        last = max(last, int(np.searchsorted(begins, samples.times[-1], "right")) - 1)
    return held, int(steps["step"][last])


def _read_first_held(process: Process, steps: Rows) -> int:
    """Return the memory that PyTorch had reserved when it was first read in some steps."""
    samples = process.records("allocator").read_window(int(steps["begin_unix_ns"][0]), int(steps["end_unix_ns"][-1]))
    peaks = steps["reserved_peak_bytes"][steps["reserved_peak_bytes"] > 0]
    read = samples.rows["reserved_bytes"][:1].tolist() if len(samples) else []
    return min([*read, *peaks[:1].tolist()], default=0)


def _read_micro_rows(known: Rows) -> int:
    """Return the rows of a micro-batch of the last of some steps; 0 if they are unknown or differ within it."""
    if not len(known) or known["micro_steps"][-1] < 1 or known["rows"][-1] < 1:
        return 0
    rows, rest = divmod(int(known["rows"][-1]), int(known["micro_steps"][-1]))
    return 0 if rest else rows


def _count_shapes(known: Rows) -> int:
    """Return how many sizes the micro-batches of some steps have."""
    counted = known[known["micro_steps"] > 0]
    return len(np.unique(np.stack([counted["rows"], counted["tokens"]]) / counted["micro_steps"], axis=1).T)


def _updates_each(optimizer: EngineOptimizer) -> bool:
    settings = optimizer.settings or {}
    return settings.get("foreach") is False and not settings.get("fused")


class _Advice(NamedTuple):
    """What helps a job, and the line for the first of it."""

    texts: dict[str, str]
    offers_rows: bool


def _advise(group: Group, pace: _Pace, line: CodeLine | None, *, has_room: bool) -> _Advice:
    """Return what helps this job.

    ``line``: of the model, where most time goes to one. ``has_room``: memory was never full.
    """
    engine, helps, fix = group.engine, [], ""
    known = group.lead.phased_steps_until(int(pace.rows["end_unix_ns"][-1]))
    terms = read_terms(engine)
    is_sharded = (engine.parallelism or "").startswith("FSDP")  # whose collectives CUDA graphs do not capture
    if engine.kind == LOOP and engine.compiled is False and not is_sharded and _count_shapes(known) <= _MOST_SHAPES:
        helps.append("capture the launches of a step as one, with CUDA graphs")
        fix = terms["graphs_fix"]
    unfused = [one for one in engine.optimizers or [] if _updates_each(one)]
    if unfused:
        setting = "fused=True" if all(one.class_ in _FUSED for one in unfused) else "foreach=True"
        helps.append(f"let the optimizer update all tensors at once, with {setting}")
        fix = fix or setting
    rows = _read_micro_rows(known)
    held, read_step = read_held(group.lead, pace.rows)
    limit = group.lead.device_bytes or 0
    is_level = held - _read_first_held(group.lead, pace.rows) <= _GROWN_SHARE * limit
    offers_rows = bool(has_room and is_level and rows > 0 and 0 < held <= _ROOM_SHARE * limit)
    if offers_rows:
        used = f"{{held:bytes}} of {{room:bytes}} were reserved up to step {read_step}"
        setting = terms["larger_batch_fix"] if rows == engine.micro_batch else ""
        more = f"raise {terms['batch_size']}, now {rows}" if setting else f"train on more than {rows} rows at once"
        is_kept = known["micro_steps"][-1] % 2 == 0  # pairs of micro-batches become one
        of_step = "and half the accumulation" if is_kept else "which may need another learning rate"
        helps.append(f"{more}, {of_step}: there is room for it ({used})")
        fix = fix or setting
    helps.append(f"use fewer, larger operations{' at {location}' if line is not None else ''}")
    sentence = "; or ".join(helps)
    values = {"held": held, "room": group.lead.device_bytes, "location": line.location if line is not None else None}
    return _Advice({"help": Text(f"{sentence[0].upper()}{sentence[1:]}.", values), "help_fix": fix}, offers_rows)
