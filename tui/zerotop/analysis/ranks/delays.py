"""Ranks that the others wait for, according to findings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zerotop.analysis.findings import Finding

# Findings about a single rank that concern each iteration, or every few, from some step on. Those that have ended do not.
_KINDS = (
    "straggler",
    "data_stall",
    "repeated_pause",
    "slow_forward",
    "uneven_batches",
    "slow_cores",
    "slow_gpu",
    "slow_clock",
    "throttled",
)


class RankDelay(NamedTuple):
    """A rank that the others wait for."""

    rank: int
    begin_ns: int  # unix time at which its first slow step began
    step: int | None = None  # the first slow one
    late_s: float = math.nan  # by how much it delays each iteration, as its finding says; NaN where it tells something else
    share: float = math.nan  # of an iteration


def list_delays(findings: Iterable[Finding], ranks: int) -> tuple[RankDelay, ...]:
    """Return the delays by single ranks of ``ranks``, in the order in which they became known."""
    return tuple(
        _read_delay(finding)
        for finding in findings
        if finding.name in _KINDS and len(finding.ranks) == 1 and ranks > 1 and "until_step" not in finding.evidence
    )


def _read_delay(finding: Finding) -> RankDelay:
    late_s = finding.evidence.get("late_s", math.nan)
    share = late_s / finding.evidence.get("iteration_s", math.nan)
    return RankDelay(finding.ranks[0], finding.begin_ns, finding.step, late_s, share)


class Hang(NamedTuple):
    """A time in which the job stood still."""

    ranks: tuple[int, ...]  # that the others wait for; () where unknown
    step: int | None
    is_over: bool


def find_hang(findings: Sequence[Finding], ranks: int, last_step_ns: int) -> Hang | None:
    """Return the last time in which a job of ``ranks`` ranks stood still; None if there was none.

    ``last_step_ns``: when its last step ended (unix time).
    """
    finding = next((one for one in reversed(findings) if one.name == "hung_ranks"), None)
    if finding is None:
        return None
    return Hang(finding.ranks if len(finding.ranks) < ranks else (), finding.step, finding.known_ns <= last_step_ns)
