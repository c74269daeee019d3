"""The summary of a finished job: the findings that cost most, and the pace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerotop.analysis.findings import Finding, Severity
from zerotop.analysis.reports.finding_costs import FindingCost, rank_findings
from zerotop.analysis.reports.verdict import describe_pace
from zerotop.recording.samples import Ints, Rows

_MOST_FINDINGS = 3


@dataclass(frozen=True, slots=True)
class EndSummary:
    """A job at its end."""

    findings: tuple[FindingCost, ...]  # those that cost most, the costliest first
    pace: str  # a sentence
    past: str = ""  # a sentence that compares it with the last runs of its command


def summarize_end(
    findings: Sequence[Finding],
    steps: Rows,
    tokens: Ints,
    end_ns: int,
    batch_step: int | None = None,
    work_s: float = 0.0,
) -> EndSummary:
    """Summarize a job from all of its findings and steps (STEP_DTYPE), with the tokens of each step.

    ``batch_step``: the step from which on batches have another size.
    ``work_s``: the probe's own work in the slowest step.
    """
    ranked = rank_findings(findings, steps, end_ns)
    return EndSummary(select_costly(ranked)[:_MOST_FINDINGS], "".join(describe_pace(steps, tokens, batch_step, work_s)))


def select_costly(ranked: Sequence[FindingCost]) -> tuple[FindingCost, ...]:
    """Leave out mere explanations."""
    return tuple(cost for cost in ranked if cost.finding.severity is not Severity.INFO or cost.seconds)
