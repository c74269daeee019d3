"""How a recording ends: the job's exit code, what was said of it, and what could not be written."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from zerotop_probe.recording import events

if TYPE_CHECKING:
    from zerotop.session.reader import Session

NOBODY_SAW = "Nobody saw how the job ended: its exit code is not known."


class Ending(NamedTuple):
    """What a recording says of its end so far."""

    exit_code: int | None  # None while the job runs and where nobody knows
    text: str  # one sentence; "" while the job may run
    lost_records: int
    lost_output_bytes: int


def ending(session: Session) -> Ending:
    """Reads how the job ended, and what its samplers and ranks could not write."""
    ends = [event.facts for event in session.events if event.name == events.JOB_ENDED]
    code = ends[-1].get("exit_code") if ends else None
    text = str(ends[-1].get("text") or NOBODY_SAW) if ends else ""
    losses = [event.facts for event in session.events if event.name == events.SAMPLER_ENDED]
    by_ranks = sum(int(source.array["lost"][-1]) for source in session.sources["probe"] if len(source.array))
    return Ending(
        code if isinstance(code, int) else None,
        text,
        by_ranks + sum(_count(facts.get("lost_records")) for facts in losses),
        sum(_count(facts.get("lost_output_bytes")) for facts in losses),
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
