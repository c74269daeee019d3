"""Code that detectors share: findings, evidence and thresholds. Contains no detector."""

from zerotop.analysis.findings.support.evidence import Evidence, Group, Process
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.analysis.findings.support.window import (
    SearchWindow,
    in_each_attempt,
    in_each_node,
    in_each_rank,
    in_events,
    in_job,
)

__all__ = [
    "Evidence",
    "Finding",
    "FindingKind",
    "Group",
    "Process",
    "SearchWindow",
    "Severity",
    "in_each_attempt",
    "in_each_node",
    "in_each_rank",
    "in_events",
    "in_job",
]
