"""What a detector says: one finding, with everything it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAUSE = None  # what a detector yields where it may be left for a while


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


def build_step_finding(
    rows: NDArray[Any],
    *,
    name: str,
    ranks: Sequence[int],
    severity: Severity,
    confidence: float,
    sentence: str,
    advice: str,
    evidence: dict[str, float],
    known_ns: int | None = None,
) -> Annotation:
    """A finding about steps (STEP_DTYPE), which is known at the end of the last of them if nothing else is said."""
    end_ns = int(rows["end_unix_ns"][-1])
    return Annotation(
        name=name,
        begin_ns=int(rows["begin_unix_ns"][0]),
        end_ns=end_ns if known_ns is None else known_ns,
        known_ns=end_ns if known_ns is None else known_ns,
        step=int(rows["step"][0]),
        ranks=tuple(ranks),
        severity=severity,
        confidence=confidence,
        sentence=sentence,
        advice=advice,
        evidence=evidence,
    )


def find_first_run(flags: NDArray[np.bool_], length: int) -> int | None:
    """Where the first so many flags in a row begin that are all set."""
    if len(flags) < length:
        return None
    runs = np.lib.stride_tricks.sliding_window_view(flags, length).all(axis=1)
    return int(np.argmax(runs)) if runs.any() else None
