"""The cost of findings in seconds and bytes, and findings ranked by it.

Seconds are the training time lost to the cause, an estimate: the finding's share of an iteration, times the iterations that
it concerns. If iterations became longer, it is the time added to each. Bytes are the most that the cause held, on one GPU or
on one node. A finding that only explains costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from zerotop.analysis.failures.end import End
from zerotop.analysis.findings import Finding, Severity, link_findings, order_by_cause
from zerotop.analysis.findings.support.causes.batch_causes import BATCH_GROWTH
from zerotop.analysis.steps.job_pace import measure_overlap
from zerotop.recording.samples import Floats, Rows
from zerotop.recording.steps.step_dtype import sum_training_s

_SKIPPING = "skipping_ended", "steps_skipped"
_SKIPPED = *_SKIPPING, "gradients_not_finite"
_LONGER = "iteration_shift", "piled_threads", "anomaly_mode", "profiler_on", "cache_emptied"
_STANDING = "hung_ranks", "rank_stopped"
_FAR_TIMES = 2.0  # a share of each iteration is lost in no more than so many usual ones
GROWING = ("memory_creep", "host_growth", "loader_growth")
"""Findings about memory that grows until it runs out."""


@dataclass(frozen=True, slots=True)
class FindingCost:
    """One event, which may be a finding on each of several ranks, and its cost."""

    finding: Finding  # on the rank where it cost most
    ranks: tuple[int, ...]  # all that are concerned, in order
    seconds: float | None  # None: not known, or nothing
    bytes: int | None  # the same
    on_host: bool = False  # whether the bytes are host memory
    cause: Finding | None = None  # the finding that explains it
    share: float | None = None  # seconds as a share of the job's training time, 0 to 1; None without that
    spent_steps: tuple[int, int] | None = None  # the first and the last of their steps, where the finding names others
    spent_ns: tuple[int, int] = (0, 0)  # begin and end of the time (unix) in which the seconds were spent, among others
    is_unfinished: bool = False  # whether no finished step includes them
    score: tuple[bool, bool, float, float] = (True, True, 0.0, 0.0)  # the costliest finding has the least

    @property
    def seconds_text(self) -> str:
        """The steps in which the seconds were spent, as the end of a phrase; "" where the finding names them."""
        if self.spent_steps is not None:
            return f" in steps {self.spent_steps[0]} to {self.spent_steps[1]}"
        return " in skipped steps" if self.finding.name in _SKIPPED else ""


def is_about_end(finding: Finding, failure: End) -> bool:
    """Whether a finding tells of the failure itself, and not of an error before it, such as ranks that hung."""
    return finding.severity is Severity.ERROR and finding.begin_ns >= failure.unix_ns


def describe_earlier(finding: Finding, failure: End) -> str:
    """Return a sentence about an error that began before the failure, with its step; "" for any other finding."""
    if finding.severity is not Severity.ERROR or is_about_end(finding, failure):
        return ""
    return f"Before{f', in step {finding.step}' if finding.step is not None else ''}: {finding.headline}."


def rank_findings(findings: Sequence[Finding], steps: Rows, end_ns: int) -> tuple[FindingCost, ...]:
    """Return the findings, the costliest first: failures, warnings, explanations; each after its cause.

    This is the order of the line under the header, of lists by cost, of the summary and of reports. ``steps``: the steps of
    the job on their slowest ranks (STEP_DTYPE). ``end_ns``: unix time at which the job or the recording ended, or a cursor.
    """
    events: dict[tuple[str, int | None], list[FindingCost]] = {}
    for finding in _drop_repetitions(findings):
        events.setdefault((finding.name, finding.step), []).append(_compute_cost(finding, findings, steps, end_ns))
    joined = _add_shares([_join_costs(costs) for costs in events.values()], measure_training_s(steps))
    largest = max((cost.bytes or 0 for cost in joined), default=0) or 1

    def score_cost(cost: FindingCost) -> tuple[bool, bool, float, float]:
        kind = cost.finding.severity
        # Memory that grows puts all of the time at risk.
        share = cost.finding.cost if cost.finding.name in GROWING else cost.share or cost.seconds or 0.0
        # A job is paid for by the hour, so time counts first. Memory decides between findings that cost little time.
        lost = share + 0.01 * (cost.bytes or 0) / largest
        return kind is not Severity.ERROR, kind is Severity.INFO, -lost, -cost.finding.cost

    ranked = sorted((replace(cost, score=score_cost(cost)) for cost in joined), key=lambda cost: cost.score)
    by_finding = {id(cost.finding): cost for cost in ranked}
    linked = order_by_cause([cost.finding for cost in ranked])
    return tuple(replace(by_finding[id(finding)], cause=cause) for finding, cause, _ in linked)


def measure_training_s(steps: Rows) -> float:
    """Return the seconds of all recorded iterations, evaluations and checkpoints (STEP_DTYPE)."""
    return sum_training_s(steps) * measure_overlap(steps)


def _add_shares(costs: Sequence[FindingCost], finished_s: float) -> list[FindingCost]:
    """Give each cost its share of one and the same time: finished steps, and what never became one.

    The end, in which nothing trains, is a share of that time and its own.
    """
    unfinished = sorted(cost.spent_ns for cost in costs if cost.is_unfinished and cost.seconds and not _is_of_end(cost))
    total_s, counted_ns = finished_s, 0
    for begin_ns, end_ns in unfinished:
        total_s += max(0, end_ns - max(begin_ns, counted_ns)) / 1e9
        counted_ns = max(counted_ns, end_ns)
    shared: list[FindingCost] = []
    for cost in costs:
        if cost.seconds and finished_s > 0:
            base_s = total_s + cost.seconds if _is_of_end(cost) else total_s
            cost = replace(cost, share=min(1.0, cost.seconds / base_s))
        shared.append(cost)
    return shared


def _is_of_end(cost: FindingCost) -> bool:
    return cost.finding.name == "long_end"


def overlap(costs: Iterable[FindingCost]) -> bool:
    """Whether some of these seconds may be the same ones: their shares must not be added up."""
    spans = sorted(cost.spent_ns for cost in costs if cost.seconds)
    return any(after[0] < before[1] for before, after in pairwise(spans))


def _drop_repetitions(findings: Sequence[Finding]) -> Iterable[Finding]:
    """Leave out findings of an event about which another finding says more: one event counts once."""
    ended, begun = _SKIPPING
    ended_ranks = {finding.ranks for finding in findings if finding.name == ended}
    for finding, cause, _ in link_findings(findings):
        # A finding that iterations became slower costs the same as its cause.
        is_same = finding.name == "iteration_shift" and cause is not None and cause.cost > 0
        if not is_same and not (finding.name == begun and finding.ranks in ended_ranks):
            yield finding


def _join_costs(costs: Sequence[FindingCost]) -> FindingCost:
    worst = max(costs, key=lambda cost: (cost.seconds or 0.0, cost.bytes or 0))
    ranks = sorted({rank for cost in costs for rank in cost.finding.ranks})
    return replace(worst, ranks=tuple(ranks))


def _compute_cost(finding: Finding, findings: Sequence[Finding], steps: Rows, end_ns: int) -> FindingCost:
    seconds, spent_ns = _compute_seconds(finding, findings, steps, end_ns)
    on_gpu, on_host = (round(_read_bytes(finding, field)) for field in ("gpu_bytes", "host_bytes"))
    is_unfinished = finding.name in _STANDING and not len(_select_hung_step(finding, steps))
    is_unfinished |= finding.name == "long_pause" and finding.step is not None and not (steps["step"] >= finding.step).any()
    is_unfinished |= finding.name in ("restarted", "stuck_at_start", "long_end")  # mostly time in which nothing trained
    return FindingCost(
        finding,
        finding.ranks,
        seconds if seconds > 0 else None,
        next((size for size in (on_gpu, on_host) if size > 0), None),
        on_host=on_gpu <= 0 < on_host,
        spent_steps=_name_steps(finding, findings, steps),
        spent_ns=spent_ns,
        is_unfinished=is_unfinished,
    )


def _select_hung_step(finding: Finding, steps: Rows) -> Rows:
    """Return the step during which the job stood still; none if it never ended."""
    middle_ns = (finding.begin_ns + finding.known_ns) // 2  # it may be known by the end of that step only
    chosen: Rows = steps[(steps["begin_unix_ns"] <= middle_ns) & (middle_ns < steps["end_unix_ns"])]
    return chosen


def _compute_seconds(
    finding: Finding, findings: Sequence[Finding], steps: Rows, end_ns: int
) -> tuple[float, tuple[int, int]]:
    """Return the seconds, and the begin and end of the time in which they were spent."""
    name, begin_ns = finding.name, finding.begin_ns
    lost_once = finding.kind.lost_once if finding.kind is not None else ""
    if name in _SKIPPED and not lost_once:
        skipped = steps[steps["skipped"]]
        return float(np.nansum(skipped["iteration_s"] * skipped["steps"])), _find_extent(skipped)
    if name == "hung_ranks":
        waited = _select_hung_step(finding, steps)
        seconds = float(waited["iteration_s"].max()) if len(waited) else (end_ns - begin_ns) / 1e9
    elif lost_once:
        seconds = finding.evidence.get(lost_once, 0.0)
    elif name in GROWING:  # its cost is what it puts at risk
        seconds = 0.0
    else:
        later = _select_steps(finding, findings, steps)
        return _measure_lost(finding, later) * measure_overlap(later), _find_extent(later)
    begin_ns -= round(seconds * 1e9) if name == "restarted" else 0  # it begins when the loss is over
    return seconds, (begin_ns, begin_ns + round(seconds * 1e9))


def _name_steps(finding: Finding, findings: Sequence[Finding], steps: Rows) -> tuple[int, int] | None:
    """Return the steps that it costs, if the finding itself names only some of them."""
    is_other = finding.kind is not None and finding.kind.costs_other_steps
    later = _select_steps(finding, findings, steps) if is_other else steps[:0]
    return (finding.step or 0, int(later["step"].max())) if len(later) else None


def _find_extent(steps: Rows) -> tuple[int, int]:
    return (int(steps["begin_unix_ns"].min()), int(steps["end_unix_ns"].max())) if len(steps) else (0, 0)


def _measure_lost(finding: Finding, later: Rows) -> float:
    """Return the seconds that these steps lost to it, on their slowest ranks."""
    name = finding.name
    if name in _LONGER and finding.cost:  # iterations that took no longer than before lost nothing
        before, after = finding.evidence["before_s"], finding.evidence["after_s"]
        # As far beyond the new level as below it, so that iterations that vary count as their mean; a pause is no part,
        # unless it began with that: the change itself may take its time.
        highest = np.where(later["step"] == finding.step, np.inf, 3 * (after - before))
        lost = np.clip(later["iteration_s"] - before, before - after, highest)
        return max(0.0, float(np.nansum(lost * later["steps"])))
    if name == "evaluations_often":  # which are no part of the iterations
        return float(np.nansum(later["eval_s"] * later["steps"]))
    if name == "evaluation_growth":
        return float(np.nansum(np.clip(later["eval_s"] - finding.evidence["first_s"], 0.0, None) * later["steps"]))
    if name == "repeated_pause":  # the pauses may have ended since
        return _sum_pauses(finding, later["iteration_s"] - finding.evidence.get("longer_before_s", 0.0), later)
    if name == "iteration_drift" and finding.cost:
        lost = np.maximum(0.0, later["iteration_s"] - finding.evidence["before_s"])
        return float(np.nansum(lost * later["steps"]))
    if name == "data_stall":  # iterations that became longer for another reason wait no longer than before
        known = later[~np.isnan(later["iteration_s"])]
        most = finding.evidence.get("mean_s", finding.evidence.get("data_s", np.inf)) * float(known["steps"].sum())
        return min(most, finding.cost * float((known["iteration_s"] * known["steps"]).sum()))
    if name == "steps_in_turn":  # some may have been as long before
        before, after, usual = (finding.evidence[key] for key in ("before_s", "after_s", "iteration_s"))
        apart = np.nan_to_num(later["checkpoint_s"]) + np.nan_to_num(later["eval_s"])
        return (after - before) / (after - usual) * _sum_pauses(finding, later["iteration_s"] + apart, later)
    # In iterations that take far longer something else takes the time.
    seconds = np.minimum(later["iteration_s"], _FAR_TIMES * finding.evidence.get("iteration_s", np.inf))
    if name == "launch_bound" and "first_step" in finding.evidence:  # the share since then may be another than before
        shares = np.where(later["step"] >= finding.evidence["first_step"], finding.evidence["share"], finding.cost)
        return float(np.nansum(shares * seconds * later["steps"]))
    return finding.cost * float(np.nansum(seconds * later["steps"]))


def _sum_pauses(finding: Finding, seconds: Floats, later: Rows) -> float:
    """Return the seconds of a finding's pauses: by how much these steps took longer than usual, where they took as long."""
    usual, pause = finding.evidence["iteration_s"], finding.evidence["pause_s"]
    longer = seconds - usual
    lost = np.where(longer >= pause / 2, np.minimum(longer, 2 * pause), 0.0)
    return float(np.nansum(lost * later["steps"]))


def _select_steps(finding: Finding, findings: Sequence[Finding], steps: Rows) -> Rows:
    """Return the steps from the finding's on, up to its end, without those of later findings of its kind on its ranks."""
    begins, until_step = steps["begin_unix_ns"], finding.evidence.get("until_step", np.inf)
    is_chosen = (begins >= finding.begin_ns) & (steps["step"] <= until_step)
    for other in findings:
        if other.name == finding.name and other.begin_ns > finding.begin_ns and set(other.ranks) & set(finding.ranks):
            is_chosen &= (begins < other.begin_ns) | (steps["step"] > other.evidence.get("until_step", np.inf))
        elif finding.name == "launch_bound" and finding.begin_ns < other.begin_ns and _has_larger_batches(other):
            is_chosen &= begins < other.begin_ns  # the GPU, with more to do for each launch, may wait for none
    chosen: Rows = steps[is_chosen]
    return chosen


def _has_larger_batches(finding: Finding) -> bool:
    """Whether iterations became longer because of larger batches."""
    is_by_batches = finding.kind is not None and finding.kind.measured_cause == BATCH_GROWTH
    return is_by_batches and finding.evidence.get("after_s", 0.0) > finding.evidence.get("before_s", 0.0)


def _read_bytes(finding: Finding, field: str) -> float:
    """Return the bytes that the finding's kind names; 0 if it names none."""
    name, _, less = getattr(finding.kind, field, "").partition(" - ")
    return finding.evidence.get(name, 0.0) - finding.evidence.get(less, 0.0)
