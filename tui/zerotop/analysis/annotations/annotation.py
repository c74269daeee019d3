"""What a detector says: one finding, with everything it rests on."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Severity(str, Enum):
    """How much a finding asks for."""

    INFO = "info"  # explains what is seen; nothing need be done
    WARNING = "warning"  # costs time or memory, or brings the job near its end
    ERROR = "error"  # the job, a rank or an allocation has failed


@dataclass(frozen=True)
class Annotation:
    """One finding. It never changes: what becomes known later is another finding.

    Times are unix nanoseconds. ``evidence`` holds the numbers of the sentence, units in their names as in tables.
    """

    name: str  # what it is, for example "double_spike"; the detector's file has the definition
    begin_ns: int
    end_ns: int
    known_ns: int  # from then on a live viewer could have been told; never before anything it rests on was recorded
    step: int | None  # the optimizer step in which it begins
    ranks: tuple[int, ...]  # which it is about, in order; empty where it is about none, for example the host
    severity: Severity
    confidence: float  # 0 to 1: how sure the cause is; what was measured is not in doubt
    sentence: str
    advice: str
    evidence: dict[str, float] = field(default_factory=dict)
