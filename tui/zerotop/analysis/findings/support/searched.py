"""What detectors look at: a rank's process, the ranks of an attempt, or the whole job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from zerotop.analysis.findings.support.finding import Finding, FindingKind

T = TypeVar("T")


class Searched:
    """The windows of detectors in it, and their findings."""

    def __init__(self) -> None:
        self.windows: dict[Any, Any] = {}
        """By detector and host."""
        self.findings: list[Finding] = []
        """Those that are news, in the order in which they were found."""
        self._derived: dict[Any, Any] = {}

    def derive(self, make: Callable[[Any], T]) -> T:
        """Return what ``make`` returned for it at first: a table made from its records, which all detectors read."""
        if make not in self._derived:
            self._derived[make] = make(self)
        derived: T = self._derived[make]
        return derived

    def has_found(self, kind: FindingKind) -> bool:
        """Whether a detector has found one of this kind."""
        return any(one.name == kind.name for one in self.findings)
