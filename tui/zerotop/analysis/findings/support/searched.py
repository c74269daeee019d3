"""What detectors look at: a rank's process, the ranks of an attempt, or the whole job."""

from __future__ import annotations

from typing import Any

from zerotop.analysis.findings.support.finding import Finding, FindingKind


class Searched:
    """The windows of detectors in it, and their findings."""

    def __init__(self) -> None:
        self.windows: dict[Any, Any] = {}
        """By detector and host."""
        self.findings: list[Finding] = []
        """Those that are news, in the order in which they were found."""

    def has_found(self, kind: FindingKind) -> bool:
        """Whether a detector has found one of this kind."""
        return any(one.name == kind.name for one in self.findings)
