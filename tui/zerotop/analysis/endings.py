"""How a recording ends: the job's exit code, what was said of it, and what could not be written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from zerotop_probe.recording import events

if TYPE_CHECKING:
    from zerotop.session.reader import Event, Session, Source

NOBODY_SAW = "Nobody saw how the job ended: its exit code is not known."


class Ending(NamedTuple):
    """What a recording says of its end so far."""

    exit_code: int | None  # None while the job runs and where nobody knows
    text: str  # one sentence; "" while the job may run
    lost_records: int
    lost_output_bytes: int


class Losses(NamedTuple):
    """What could not be written, as on a full disk."""

    records: int
    output_bytes: int

    @property
    def sentence(self) -> str:
        """Says so; "" if everything was written."""
        parts = [f"{self.records} records"] if self.records else []
        parts += [f"{self.output_bytes} bytes of the job's output"] if self.output_bytes else []
        return f"The recording is incomplete: {' and '.join(parts)} could not be written." if parts else ""


def ending(session: Session) -> Ending:
    """Reads how the job ended, and what its samplers and ranks could not write."""
    told: dict[str, list[Event]] = {}
    for event in session.events:
        told.setdefault(event.name, []).append(event)
    ends = [event.facts for event in told.get(events.JOB_ENDED, ())]
    code = ends[-1].get("exit_code") if ends else None
    text = str(ends[-1].get("text") or NOBODY_SAW) if ends else ""
    return Ending(code if isinstance(code, int) else None, text, *losses(session.sources["probe"], told))


def losses(probes: Iterable[Source], told: Mapping[str, Sequence[Event]], cursor_ns: int | None = None) -> Losses:
    """What ranks (tables ``probe``) and samplers had said up to the cursor that they could not write; None is the end.

    ``told``: events by name. On a full disk a rank's table stands still, and its last word says what followed.
    """
    until_ns = math.inf if cursor_ns is None else cursor_ns
    counted: dict[tuple[str, int], int] = {}
    for source in probes:
        known = len(source.array) if cursor_ns is None else source.count_known(cursor_ns)
        lost = int(source.array["lost"][known - 1]) if known else 0
        counted[source.host, source.pid] = counted.get((source.host, source.pid), 0) + lost
    said: dict[tuple[str, int], int] = {}
    for event in (*told.get(events.LEFT, ()), *told.get(events.GOODBYE, ())):
        if event.unix_ns <= until_ns:
            said[event.host, event.pid] = said.get((event.host, event.pid), 0) + _count(event.facts.get("lost"))
    by_ranks = sum(max(counted.get(rank, 0), said.get(rank, 0)) for rank in {*counted, *said})
    ends = [event.facts for event in told.get(events.SAMPLER_ENDED, ()) if event.unix_ns <= until_ns]
    return Losses(
        by_ranks + sum(_count(facts.get("lost_records")) for facts in ends),
        sum(_count(facts.get("lost_output_bytes")) for facts in ends),
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
