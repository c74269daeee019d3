"""Ranks that delay the others according to findings, and since when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zerotop.analysis.annotations import Annotation

# Findings about what one rank does in each iteration from some step on.
_KINDS = ("straggler", "data_stall", "slow_forward", "throttled")


class Delay(NamedTuple):
    """A rank that the others wait for."""

    rank: int
    begin_ns: int  # unix time at which its first slow step began


def list_delays(findings: Iterable[Annotation], ranks: int) -> tuple[Delay, ...]:
    """Return the delays by single ranks of ``ranks``, in the order in which they became known."""
    return tuple(
        Delay(finding.ranks[0], finding.begin_ns)
        for finding in findings
        if finding.name in _KINDS and len(finding.ranks) == 1 and ranks > 1
    )
