"""Loader workers deliver a few batches together, and then none for seconds: training waits in every n-th step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from zerotop.analysis.code_line import CodeLine, find_own
from zerotop.analysis.findings.pace.data_stall import KIND
from zerotop.analysis.findings.support.causes.loader_causes import find_late_line, find_loader_cause
from zerotop.analysis.findings.support.evidence import Floats, Group, Process, Rows
from zerotop.analysis.findings.support.finding import Finding
from zerotop.analysis.findings.support.host_load import count_workers
from zerotop.analysis.findings.support.lines.stack_lines import SLOW, UNSEEN, select_events_in
from zerotop.analysis.findings.support.thresholds import FAR_SHARE, STALL_SHARE
from zerotop.analysis.findings.support.window import SearchWindow, in_each_attempt
from zerotop_probe.recording.events import Stacks

_BURSTS = KIND.with_changes(
    headline="{share:percent} of the time is a wait for data: {pause_s:seconds} every {period:.0f} steps",
    details="{pauses:count pause} since step {step}[ on {concerned:ranks}][, at {line}][; {workers}]. Other iterations take"
    " {iteration_s:seconds}.",
)
_PLACES = ("data", UNSEEN)
# The function of PyTorch's loader that waits for the next batch.
_LOADERS, _WAITING = "torch/utils/data/", "_next_data"
# Steps that show it, or fewer if they take most of the time; measured again after this share of more ones.
_FEWEST, _FEWEST_FAR, _MORE = 3, 2, 1 / 8
# A wait that is shorter than this share of the usual one has other reasons.
_ALIKE_SHARE = 0.25
# Each worker has prepared at most this many batches, and takes turns. Longer periods are those of epochs.
_MOST_TURNS = 4


class _Bursts:
    """The steps in which a rank waited for its loader's workers."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.due = _FEWEST_FAR
        self.line: CodeLine | None = None
        self.first: int | None = None  # the first step, once it was told
        self.begin_ns = self.known_ns = 0  # of its first step, and when it was told first
        self.awaits_workers = True


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report the waits of the first rank that shows them, and again with more of them."""
    for process in window.subject.processes:
        bursts = window.keep(_Bursts, process)
        for event in select_events_in(window.items(process.events_of(Stacks), process), _PLACES, SLOW):
            step = event.step
            if step is not None and _is_waiting(event, bursts) and step not in bursts.steps[-1:]:
                bursts.steps.append(step)
            if len(bursts.steps) >= bursts.due:
                finding = _measure_bursts(window.subject, process, bursts, event.unix_ns)
                if finding is not None:
                    bursts.due = len(bursts.steps) + math.ceil(_MORE * len(bursts.steps))
                    bursts.begin_ns, bursts.known_ns = finding.begin_ns, bursts.known_ns or event.unix_ns
                    yield finding
        is_told = bursts.known_ns and bursts.awaits_workers
        late_ns = find_late_line(process, bursts.begin_ns, bursts.known_ns) if is_told else None
        if late_ns is not None and late_ns <= process.at.cursor_ns:
            bursts.awaits_workers = False
            finding = _measure_bursts(window.subject, process, bursts, late_ns)
            if finding is not None:
                yield finding


def _is_waiting(event: Stacks, bursts: _Bursts) -> bool:
    """Whether most samples of a slow step wait for the loader's workers."""
    waited = 0.0
    for stack in event.stacks:
        frames = [event.frames[number] for number in stack.frames if 0 <= number < len(event.frames)]
        if any(frame.file.startswith(_LOADERS) and frame.function.endswith(_WAITING) for frame in frames):
            waited += stack.seconds or 0.0
            own = find_own(event.frames, stack)
            bursts.line = CodeLine(*own[:4]) if own is not None else bursts.line
    return waited > sum(stack.seconds or 0.0 for stack in event.stacks) / 2


def _measure_bursts(group: Group, process: Process, bursts: _Bursts, known_ns: int) -> Finding | None:
    """Return the finding; None if the waits are few or short, those of epochs, or told by another finding."""
    rows = process.steps_until(known_ns)
    rows = rows[np.searchsorted(rows["step"], bursts.steps[0] if bursts.first is None else bursts.first) :]
    waits = np.flatnonzero(np.isin(rows["step"], bursts.steps))
    usual = float(np.nanmedian(rows["iteration_s"])) if len(rows) else 0.0
    waited: Floats = np.maximum(0.0, rows["iteration_s"][waits] - usual)
    is_long = waited >= _ALIKE_SHARE * np.median(waited) if len(waits) else np.zeros(0, bool)
    waits, waited = waits[is_long], waited[is_long]
    if len(waits) < _FEWEST_FAR:
        return None
    rows = rows[waits[0] :]
    share = float(waited.sum() / np.nansum(rows["iteration_s"]))
    period = float(np.median(np.diff(waits)))
    workers = count_workers([process], int(rows["begin_unix_ns"][0]), known_ns)
    is_enough = len(waits) >= _FEWEST or share >= FAR_SHARE
    if share < STALL_SHARE or not is_enough or not 1 < period <= _MOST_TURNS * workers:
        return None
    if KIND.name in group.reported and bursts.first is None:
        return None
    group.reported.add(KIND.name)
    bursts.first = int(rows["step"][0]) if bursts.first is None else bursts.first
    return _build_finding(group, process, bursts, rows, known_ns, {"pauses": len(waits), "period": period, "share": share})


def _build_finding(
    group: Group, process: Process, bursts: _Bursts, rows: Rows, known_ns: int, evidence: dict[str, float]
) -> Finding:
    usual = float(np.nanmedian(rows["iteration_s"]))
    lost = evidence["share"] * float(np.nansum(rows["iteration_s"]))
    loader = find_loader_cause(process, int(rows["begin_unix_ns"][0]), known_ns)
    kind = _BURSTS
    if loader is not None and loader.advice is not None:
        kind = kind.with_changes(advice=loader.advice[0], fix=loader.advice[1])
    is_one_of_several = len(group.processes) > 1
    return kind.at_steps(
        process if is_one_of_several else group,
        rows,
        {**evidence, "pause_s": lost / evidence["pauses"], "iteration_s": usual},
        known_ns=known_ns,
        cost=evidence["share"],
        concerned=(process.rank,) if is_one_of_several else None,
        line=bursts.line.text if bursts.line is not None else None,
        workers=loader.text if loader is not None else None,
        pid=process.source.pid,
    )
