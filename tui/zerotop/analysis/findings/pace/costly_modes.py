"""A mode that slows down each step stays on: anomaly mode, PyTorch's profiler, a cache that is emptied in each step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, Process, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.mode_uses import CLEARING, ModeUse, list_uses
from zerotop.analysis.findings.support.thresholds import MORE_STEPS, SHOWN_SHARE
from zerotop.analysis.stats.change_points import LEVEL_STEPS, SETTLED_STEPS
from zerotop.recording.samples import Rows
from zerotop_probe.recording.event_values import ANOMALY, PROFILER

_ANOMALY = FindingKind(
    name="anomaly_mode",
    confidence=0.95,
    headline="Anomaly mode {since}[: iterations take {after_s:seconds} instead of {before_s:seconds}]",
    details="[It was switched on at {line}. ][Where phases were recorded, iterations take {phased_s:seconds}: the forward"
    " {forward_after_s:seconds} instead of {forward_before_s:seconds}, the backward {backward_after_s:seconds} instead of"
    " {backward_before_s:seconds}. ]"
    "Each operation of a forward keeps its Python stack, and each backward looks for NaN.",
    advice="Switch anomaly mode on only to look for the origin of a NaN, and off again after that batch.",
    fix="{anomaly_fix}",
)
_PROFILER = FindingKind(
    name="profiler_on",
    confidence=0.95,
    headline="PyTorch's profiler {since}[: iterations take {after_s:seconds} instead of {before_s:seconds}]",
    details="It records each operation, and keeps the records in host memory until it stops.",
    advice="Let the profiler record a few steps only.",
    fix="schedule=torch.profiler.schedule(wait=10, warmup=2, active=3, repeat=1)",
)
_CLEARING = FindingKind(
    name="cache_emptied",
    confidence=0.95,
    headline="The allocator's cache is emptied in each step[: {place}]",
    details="[Iterations take {after_s:seconds} instead of {before_s:seconds} from step {step} on. ]"
    "The call of torch.cuda.empty_cache()[ at {line}] takes {call_s:seconds}, and the next step has to request from the"
    " driver the memory that PyTorch would have kept.",
    advice="Take the call out of the loop. Against fragmentation, use expandable segments.",
    fix="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
)
_KINDS = {ANOMALY: _ANOMALY, PROFILER: _PROFILER, CLEARING: _CLEARING}
# A smaller rise of the iteration time has other reasons.
_COST_SHARE = 0.05


class _Told(NamedTuple):
    """A mode that was told, by so many steps since it was switched on."""

    process: Process
    use: ModeUse
    steps: int
    finding: Finding  # that was shown last


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each mode once for each attempt, when it has been on for long enough, and again as its level becomes known."""
    group, told = window.subject, window.keep(set[str])
    uses = [(process, use) for process in group.processes for use in list_uses(process) if use.mode not in told]
    known = [(known_ns, *one) for one in uses if (known_ns := one[1].find_lasting(one[0])) is not None]
    new = []
    for known_ns, process, use in sorted(known, key=lambda one: one[0]):
        if use.mode not in told:
            told.add(use.mode)
            steps = len(_select_since(process, use, known_ns))
            new.append(_Told(process, use, steps, _build_finding(group, process, use, known_ns)))
    for one in window.follow(new, partial(_look_again, group)):
        yield one.finding


def _look_again(group: Group, told: _Told) -> _Told | None:
    """Return what is told of a mode after a part more of the steps in which it is on; None before those."""
    process, due = told.process, told.steps + max(SETTLED_STEPS, told.steps // MORE_STEPS)
    use = next(one for one in list_uses(process) if (one.mode, one.begin_ns) == (told.use.mode, told.use.begin_ns))
    later = _select_since(process, use, process.recording.cursor_ns)
    if not told.finding.cost or len(later) < due or (use.end_ns is not None and later["end_unix_ns"][due - 1] > use.end_ns):
        return None
    known_ns = max(int(later["end_unix_ns"][due - 1]), told.finding.known_ns + 1)
    finding = _build_finding(group, process, use, known_ns, told.finding.ranks)
    shown = told.finding.evidence
    levels = [name for name in ("after_s", "phased_s") if name in shown]
    is_other = any(abs(finding.evidence.get(name, np.inf) / shown[name] - 1) > SHOWN_SHARE for name in levels)
    return told._replace(steps=due, finding=finding if is_other else told.finding)


def _select_since(process: Process, use: ModeUse, known_ns: int) -> Rows:
    """Return the steps in which the mode was on, up to a time. It may have been on for only a part of the first one."""
    steps = process.steps_until(known_ns)
    return steps[np.searchsorted(steps["end_unix_ns"], use.begin_ns, "right") :]


def _build_finding(
    group: Group, process: Process, use: ModeUse, known_ns: int, ranks: tuple[int, ...] | None = None
) -> Finding:
    """Return the finding as known at a time. ``ranks``: those that were told already."""
    kind, before = _KINDS[use.mode], process.steps_until(use.begin_ns)[-LEVEL_STEPS:]
    after = _select_since(process, use, known_ns)
    evidence: dict[str, float] = {}
    if len(before) >= SETTLED_STEPS:
        evidence = _compare_medians("", before, after[1:], "iteration_s")
        if evidence["after_s"] < (1 + _COST_SHARE) * evidence["before_s"]:
            kind, evidence = kind.with_changes(severity=Severity.INFO), {}
        else:
            evidence |= _compare_phases(process, use, known_ns)
    if ranks is None:
        uses = ((one.rank, other) for one in group.processes for other in list_uses(one))
        ranks = tuple(sorted({rank for rank, other in uses if other.mode == use.mode and other.known_ns <= known_ns}))
    is_lightning = group.engine.library == "Lightning"
    return kind.at_steps(
        group,
        after,
        evidence,
        known_ns=known_ns,
        ranks=ranks,
        cost=1 - evidence["before_s"] / evidence["after_s"] if evidence else 0.0,
        since=f"from step {int(after['step'][0])} on" if len(before) else "is on in each step",
        call_s=use.call_s,
        place=use.line.place if use.line is not None else None,
        line=use.line.text if use.line is not None else None,
        anomaly_fix="Trainer(detect_anomaly=False)" if is_lightning else "torch.autograd.set_detect_anomaly(False)",
    )


def _compare_medians(prefix: str, before: Rows, after: Rows, column: str) -> dict[str, float]:
    parts = (("before_s", before), ("after_s", after))
    return {f"{prefix}{name}": float(np.median(rows[column])) for name, rows in parts if len(rows)}


def _compare_phases(process: Process, use: ModeUse, known_ns: int) -> dict[str, float]:
    """Compare the phases of the nearest steps before that have phases with those of all such steps after."""
    before = process.phased_steps_until(use.begin_ns)[-SETTLED_STEPS:]
    after = process.phased_steps_until(known_ns)
    after = after[np.searchsorted(after["begin_unix_ns"], use.begin_ns) :]
    if not len(before) or not len(after):
        return {}
    phases = (_compare_medians(f"{name}_", before, after, f"{name}_s") for name in ("forward", "backward"))
    return {"phased_s": float(np.median(after["iteration_s"]))} | {
        name: seconds for each in phases for name, seconds in each.items()
    }
