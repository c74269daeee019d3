"""A finding as plain values, for programs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from zerotop.analysis.findings import Finding, link_findings
from zerotop.analysis.reports.finding_costs import FindingCost, rank_findings
from zerotop.analysis.reports.recorded_run import RecordedRun


def list_findings_json(run: RecordedRun) -> list[dict[str, Any]]:
    """Return all findings of a run, in the order in which they became known."""
    costs = {id(cost.finding): cost for cost in rank_findings(run.findings, run.source.job_steps, run.source.end_ns)}
    linked = link_findings(run.findings)
    return [build_finding_json(finding, cause, costs.get(id(finding))) for finding, cause, _ in linked]


def build_finding_json(finding: Finding, cause: Finding | None, cost: FindingCost | None) -> dict[str, Any]:
    """Return the fields of a finding with its cause and what it cost; None where unknown."""
    facts = dataclasses.asdict(finding)
    del facts["kind"]
    facts["because_of"] = {name: getattr(cause, name) for name in ("name", "step", "ranks")} if cause is not None else None
    lost = (cost.seconds, cost.share, cost.bytes) if cost is not None else (None, None, None)
    facts["lost_s"], facts["lost_share"], facts["held_bytes"] = lost  # the share is of the job's training time
    facts["severity"] = finding.severity.value
    facts["evidence"] = {name: value if math.isfinite(value) else None for name, value in finding.evidence.items()}
    return facts
