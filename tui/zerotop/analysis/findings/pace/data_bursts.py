"""Loader workers deliver a few batches together, and then none for seconds: training waits in every n-th step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from zerotop.analysis.code_line import CodeLine, find_own
from zerotop.analysis.findings.pace.data_stall import KIND
from zerotop.analysis.findings.support import Finding, Group, Process, SearchWindow, in_each_attempt
from zerotop.analysis.findings.support.causes.loader_causes import find_late_line, find_loader_cause
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
# A wait that is shorter than this share of the usual one has other reasons.
_ALIKE_SHARE = 0.25
# Iterations without a wait: their usual duration is looked for near this percentile, as every second one may wait.
_USUAL_PERCENT = 25
# Iterations of which nothing was sampled are waits if at least this share of the sampled ones, as long as they, is.
_SAMPLED_SHARE = 0.75
# Each worker has prepared at most this many batches, and takes turns. Longer periods are those of epochs.
_MOST_TURNS = 4


class _Bursts:
    """The steps in which stacks show whether a rank waited for its loader's workers."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.others: dict[int, float] = {}  # slow steps with most samples elsewhere: seconds of these
        self.line: CodeLine | None = None
        self.first: int | None = None  # the first step, once it was told
        self.due = 0  # the number of steps with which it is told again
        self.begin_ns = self.known_ns = 0  # of its first step, and when it was told first
        self.awaits_workers = True


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report the waits of the first rank that shows them, and again with more of them."""
    for process in window.subject.processes:
        bursts = window.keep(_Bursts, process)
        for event in select_events_in(window.items(process.events_of(Stacks), process), _PLACES, SLOW):
            yield from _tell_again(window.subject, process, bursts, event.unix_ns)
            if _note_step(event, bursts) and bursts.first is None:
                yield from _tell(window.subject, process, bursts, event.unix_ns)
        is_told = bursts.known_ns and bursts.awaits_workers
        late_ns = find_late_line(process, bursts.begin_ns, bursts.known_ns) if is_told else None
        if late_ns is not None and late_ns <= process.at.cursor_ns:
            yield from _tell_again(window.subject, process, bursts, late_ns)
            bursts.awaits_workers = False
            yield from _tell(window.subject, process, bursts, late_ns)
        yield from _tell_again(window.subject, process, bursts, process.at.cursor_ns)


def _tell_again(group: Group, process: Process, bursts: _Bursts, until_ns: int) -> Iterator[Finding]:
    while bursts.first is not None and bursts.due <= len(steps := process.steps_until(until_ns)):
        yield from _tell(group, process, bursts, int(steps["end_unix_ns"][bursts.due - 1]))


def _tell(group: Group, process: Process, bursts: _Bursts, known_ns: int) -> Iterator[Finding]:
    finding = _measure_bursts(group, process, bursts, known_ns)
    if finding is not None:
        bursts.begin_ns, bursts.known_ns = finding.begin_ns, bursts.known_ns or known_ns
        yield finding
    steps = process.steps_until(known_ns)["step"]
    if bursts.first is not None:
        bursts.due = len(steps) + math.ceil(_MORE * (len(steps) - int(np.searchsorted(steps, bursts.first))))


def _note_step(event: Stacks, bursts: _Bursts) -> bool:
    """Return whether most samples of a slow step wait for the loader's workers, if nothing was known of that step."""
    waited, sampled = 0.0, sum(stack.seconds or 0.0 for stack in event.stacks)
    if event.step is None or event.step in bursts.waited[-1:]:
        return False
    for stack in event.stacks:
        frames = [event.frames[number] for number in stack.frames if 0 <= number < len(event.frames)]
        if any(frame.file.startswith(_LOADERS) and frame.function.endswith(_WAITING) for frame in frames):
            waited += stack.seconds or 0.0
            own = find_own(event.frames, stack)
            bursts.line = CodeLine(*own[:4]) if own is not None else bursts.line
    if waited > sampled / 2:
        bursts.waited.append(event.step)
    else:
        bursts.others[event.step] = bursts.others.get(event.step, 0.0) + sampled - waited
    return waited > sampled / 2


def _measure_bursts(group: Group, process: Process, bursts: _Bursts, known_ns: int) -> Finding | None:
    """Return the finding; None if the waits are few or short, those of epochs, or told by another finding."""
    if len(bursts.waited) < _FEWEST_FAR or (bursts.first is None and group.has_found(KIND)):
        return None
    steps = process.steps_until(known_ns)
    begin = int(np.searchsorted(steps["step"], bursts.waited[0] if bursts.first is None else bursts.first))
    workers = count_workers([process], int(steps["begin_unix_ns"][begin]), known_ns)
    usual_s, waited_s = _measure_waits(steps, begin, bursts)
    if bursts.first is None:
        begin = _find_begin(waited_s, begin, _MOST_TURNS * workers)
    rows, waited_s = steps[begin:], waited_s[begin:]
    waits = np.flatnonzero(waited_s)
    if len(waits) < _FEWEST_FAR:
        return None
    waited = float(waited_s.sum())
    share = waited / sum_training_s(rows)
    period = float(np.diff(waits).mean())
    is_enough = len(waits) >= _FEWEST or share >= FAR_SHARE
    has_passed = bursts.first is not None and len(rows) - waits[-1] > 2 * period
    if share < STALL_SHARE or not is_enough or not 1 < period <= _MOST_TURNS * workers or has_passed:
        return None
    bursts.first = int(rows["step"][0]) if bursts.first is None else bursts.first
    evidence = {"pauses": len(waits), "period": period, "share": share, "pause_s": waited / len(waits)}
    evidence["iteration_s"] = usual_s
    return _build_finding(group, process, bursts, rows, known_ns, evidence)


def _measure_waits(steps: Rows, begin: int, bursts: _Bursts) -> tuple[float, Floats]:
    """Return the usual iteration since ``begin``, and the seconds that each step waited for data, 0 for none.

    Stacks are sampled, and phases recorded, in some steps only: others that take as long also wait, if most of these do.
    """
    seconds, rows = np.nan_to_num(steps["iteration_s"]), steps[begin:]
    is_seen = np.isin(steps["step"], bursts.waited)
    low = float(np.percentile(seconds[begin:], _USUAL_PERCENT))
    middle = (low + float(np.median(seconds[is_seen]))) / 2
    usual_s = float(np.median(rows["iteration_s"][seconds[begin:] < middle])) if low < middle else low
    longer = np.maximum(0.0, seconds - usual_s - np.nan_to_num(steps["eval_s"] + steps["checkpoint_s"]))
    waited_s = np.where(has_phases(steps), np.minimum(longer, np.nan_to_num(steps["data_s"])), longer)
    least = _ALIKE_SHARE * float(np.median(waited_s[is_seen]))
    is_seen |= has_phases(steps) & (waited_s >= least)
    elsewhere_s = np.array([bursts.others.get(step, 0.0) for step in steps["step"].tolist()])
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
    group: Group, process: Process, bursts: _Bursts, rows: Rows, known_ns: int, evidence: dict[str, float]
) -> Finding:
    loader = find_loader_cause(process, int(rows["begin_unix_ns"][0]), known_ns)
    kind = _BURSTS
    if loader is not None and loader.advice is not None:
        kind = kind.with_changes(advice=loader.advice[0], fix=loader.advice[1])
    is_one_of_several = len(group.processes) > 1
    return kind.at_steps(
        process if is_one_of_several else group,
        rows,
        evidence,
        known_ns=known_ns,
        cost=evidence["share"],
        concerned=(process.rank,) if is_one_of_several else None,
        line=bursts.line.text if bursts.line is not None else None,
        location=bursts.line.location if bursts.line is not None else None,
        workers=loader.text if loader is not None else None,
        pid=process.source.pid,
    )
