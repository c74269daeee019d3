"""Loader workers deliver a few batches together, and then none for seconds: training waits in every n-th step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from zerotop.analysis.code_line import CodeLine, find_own
from zerotop.analysis.findings.pace.data_stall import KIND
from zerotop.analysis.findings.pace.worker_turns import find_worker_turns
from zerotop.analysis.findings.support import Finding, Group, Process, SearchWindow, in_each_attempt
from zerotop.analysis.findings.support.causes.loader_causes import find_loader_cause, list_late_times
from zerotop.analysis.findings.support.host_load import count_workers
from zerotop.analysis.findings.support.lines.stack_lines import SLOW, UNSEEN, select_events_in
from zerotop.analysis.findings.support.thresholds import FAR_SHARE, STALL_SHARE
from zerotop.recording.samples import Floats, Rows
from zerotop.recording.steps.step_dtype import has_phases, sum_training_s
from zerotop_probe.recording.events import Stacks

_BURSTS = KIND.with_changes(
    headline=(
        "From step {step} on, {share:percent} of the time is a wait for data: {pause_s:seconds} every {period:.0f} steps"
    ),
    details="{pauses:count pause} since step {step}[ on {concerned:ranks}][, at {line}][; {workers}]. Other iterations take"
    " {iteration_s:seconds}.",
)
_PLACES = ("data", UNSEEN)
# The function of PyTorch's loader that waits for the next batch.
_LOADERS, _WAITING = "torch/utils/data/", "_next_data"
# Waits that show it, or fewer if they take most of the time; measured again after this share of more steps.
_FEWEST, _FEWEST_FAR, _MORE = 3, 2, 1 / 8
# Steps with which turns of the workers are looked for first, whether waits were sampled or not.
_FIRST_DUE = 32
# A wait that is shorter than this share of the usual one has other reasons.
_ALIKE_SHARE = 0.25
# Iterations without a wait: their usual duration is looked for near this percentile, as every second one may wait.
_USUAL_PERCENT = 25
# Iterations of which nothing was sampled are waits if at least this share of the sampled ones, as long as they, is.
_SAMPLED_SHARE = 0.75
# Each worker has prepared at most this many batches, and takes turns. Longer periods are those of epochs.
_MOST_TURNS = 4


class _Seen(NamedTuple):
    """A slow step of which stacks were sampled."""

    known_ns: int
    step: int
    waits: bool  # for the loader's workers, in most samples
    elsewhere_s: float  # samples that do not
    line: CodeLine | None  # that waits


class _Bursts(NamedTuple):
    """The waits as measured at a time."""

    finding: Finding | None
    told: Finding | None  # the first finding
    seen: int  # how many samples were taken into account
    due: int = 0  # the number of steps with which they are measured again
    late_told: int = 0  # times at which more became known of the workers


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report the waits of the first rank that shows them, and again with more of them."""
    for process in window.subject.processes:
        seen: list[_Seen] = window.keep(list, process)  # reads the stacks of each step once
        for event in select_events_in(window.items(process.events_of(Stacks), process), _PLACES, SLOW):
            if event.step is not None and event.step != next((one.step for one in reversed(seen) if one.waits), None):
                seen.append(_read_event(event, event.step))
        find_next = partial(_find_next, window.subject, process, seen)
        yield from (bursts.finding for bursts in window.extend(find_next, 0, process))


def _read_event(event: Stacks, step: int) -> _Seen:
    waited, line = 0.0, None
    for stack in event.stacks:
        frames = [event.frames[number] for number in stack.frames if 0 <= number < len(event.frames)]
        if any(frame.file.startswith(_LOADERS) and frame.function.endswith(_WAITING) for frame in frames):
            waited += stack.seconds or 0.0
            own = find_own(event.frames, stack)
            line = CodeLine(*own[:4]) if own is not None else line
    elsewhere = sum(stack.seconds or 0.0 for stack in event.stacks) - waited
    return _Seen(event.unix_ns, step, waited > elsewhere, elsewhere, line)


def _find_next(group: Group, process: Process, seen: list[_Seen], last: _Bursts | None) -> _Bursts | None:
    """Measure the waits with each one more until they were told; then with more steps, and with more of the workers."""
    told = last.told if last is not None else None
    if last is None or told is None:
        read = last.seen if last is not None else 0
        count = next((count for count, one in enumerate(seen[read:], read + 1) if one.waits), None)
        sampled_ns = seen[count - 1].known_ns if count is not None else math.inf
        due = last.due if last is not None else _FIRST_DUE
        steps = process.steps_until(process.at.cursor_ns)
        due_ns = int(steps["end_unix_ns"][due - 1]) if due <= len(steps) else math.inf
        if (known_ns := min(sampled_ns, due_ns)) == math.inf:
            return None
        return _measure_next(group, process, seen[: count if sampled_ns <= due_ns else read], None, int(known_ns))
    late_ns = list_late_times(process, told.begin_ns, told.known_ns)[last.late_told :][:1]
    times = [time_ns for time_ns in late_ns if time_ns <= process.at.cursor_ns]
    if last.due <= len(steps := process.steps_until(process.at.cursor_ns)):
        times.append(int(steps["end_unix_ns"][last.due - 1]))
    if not times:
        return None
    known_ns = min(times)
    known = [one for one in seen if one.known_ns < known_ns]
    bursts = _measure_next(group, process, known, told, known_ns)
    return bursts._replace(late_told=last.late_told + (known_ns in late_ns))


def _measure_next(group: Group, process: Process, seen: list[_Seen], told: Finding | None, known_ns: int) -> _Bursts:
    finding = _measure_bursts(group, process, seen, told, known_ns)
    told, steps = told or finding, process.steps_until(known_ns)["step"]
    since = len(steps) - int(np.searchsorted(steps, told.step or 0)) if told is not None else len(steps)
    return _Bursts(finding, told, len(seen), len(steps) + math.ceil(_MORE * since))


def _measure_bursts(
    group: Group, process: Process, seen: list[_Seen], told: Finding | None, known_ns: int
) -> Finding | None:
    """Return the finding; None if the waits are few or short, those of epochs, or told by another finding."""
    known = [one.step for one in seen if one.waits]
    steps = process.steps_until(known_ns)
    if not len(steps) or (told is None and group.has_found(KIND)):
        return None
    turns = find_worker_turns(process, steps, known, told.step if told is not None else None)
    if turns is not None:
        return _build_finding(group, process, seen, turns.rows, known_ns, turns.evidence)
    if len(known) < _FEWEST_FAR:
        return None
    begin = int(np.searchsorted(steps["step"], known[0] if told is None else told.step or 0))
    workers = count_workers([process], int(steps["begin_unix_ns"][begin]), known_ns)
    usual_s, waited_s = _measure_waits(steps, begin, seen)
    if told is None:
        begin = _find_begin(waited_s, begin, _MOST_TURNS * workers)
    rows, waited_s = steps[begin:], waited_s[begin:]
    waits = np.flatnonzero(waited_s)
    if len(waits) < _FEWEST_FAR:
        return None
    waited = float(waited_s.sum())
    share = waited / sum_training_s(rows)
    period = float(np.diff(waits).mean())
    is_enough = len(waits) >= _FEWEST or share >= FAR_SHARE
    has_passed = told is not None and len(rows) - waits[-1] > 2 * period
    if share < STALL_SHARE or not is_enough or not 1 < period <= _MOST_TURNS * workers or has_passed:
        return None
    evidence = {"pauses": len(waits), "period": period, "share": share, "pause_s": waited / len(waits)}
    evidence["iteration_s"] = usual_s
    return _build_finding(group, process, seen, rows, known_ns, evidence)


def _measure_waits(steps: Rows, begin: int, seen: list[_Seen]) -> tuple[float, Floats]:
    """Return the usual iteration since ``begin``, and the seconds that each step waited for data, 0 for none.

    Stacks are sampled, and phases recorded, in some steps only: others that take as long also wait, if most of these do.
    """
    seconds, rows = np.nan_to_num(steps["iteration_s"]), steps[begin:]
    is_seen = np.isin(steps["step"], [one.step for one in seen if one.waits])
    low = float(np.percentile(seconds[begin:], _USUAL_PERCENT))
    middle = (low + float(np.median(seconds[is_seen]))) / 2
    usual_s = float(np.median(rows["iteration_s"][seconds[begin:] < middle])) if low < middle else low
    longer = np.maximum(0.0, seconds - usual_s - np.nan_to_num(steps["eval_s"] + steps["checkpoint_s"]))
    waited_s = np.where(has_phases(steps), np.minimum(longer, np.nan_to_num(steps["data_s"])), longer)
    least = _ALIKE_SHARE * float(np.median(waited_s[is_seen]))
    is_seen |= has_phases(steps) & (waited_s >= least)
    others: dict[int, float] = {}
    for one in seen:
        others[one.step] = others.get(one.step, 0.0) + (0.0 if one.waits else one.elsewhere_s)
    elsewhere_s = np.array([others.get(step, 0.0) for step in steps["step"].tolist()])
    # A sampled step may wait although the few samples show what it does otherwise.
    is_other = ~is_seen & (longer >= least) & (has_phases(steps) | (elsewhere_s - usual_s > longer / 2))
    counts = [int(some[begin:].sum()) for some in (is_seen, is_other)]
    if counts[0] < _SAMPLED_SHARE * sum(counts):
        is_other = ~is_seen
    return usual_s, np.where((waited_s >= least) & ~is_other, waited_s, 0.0)


def _find_begin(waited_s: Floats, begin: int, most_turns: int) -> int:
    """Return the first step of the turns: the waits before the first one of which stacks were sampled, if near enough."""
    waits = np.flatnonzero(waited_s)
    waits = waits[: np.searchsorted(waits, begin, "right")]
    apart = np.flatnonzero(np.diff(waits) > most_turns)
    return int(waits[apart[-1] + 1 if len(apart) else 0]) if len(waits) else begin


def _build_finding(
    group: Group, process: Process, seen: list[_Seen], rows: Rows, known_ns: int, evidence: dict[str, float]
) -> Finding:
    loader = find_loader_cause(process, int(rows["begin_unix_ns"][0]), known_ns)
    kind = _BURSTS if loader is None else loader.advise(_BURSTS)
    line = next((one.line for one in reversed(seen) if one.line is not None), None)
    is_one_of_several = len(group.processes) > 1
    return kind.at_steps(
        process if is_one_of_several else group,
        rows,
        evidence,
        known_ns=known_ns,
        cost=evidence["share"],
        concerned=(process.rank,) if is_one_of_several else None,
        line=line.text if line is not None else None,
        location=line.location if line is not None else None,
        workers=loader.text if loader is not None else None,
        pid=process.source.pid,
    )
