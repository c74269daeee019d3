"""How a recording ends: the job's exit code, what was said of it, and what could not be written."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from zerotop.analysis.keys import ProcessKey
from zerotop_probe.recording import events

if TYPE_CHECKING:
    from zerotop.session.reader import Session

UNSEEN_END = "Nobody saw how the job ended: its exit code is not known."


# That of which the later one counts.
_STATE_EVENTS = (events.JOB_ENDED, events.DETACHED, events.ATTACHED)


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
    def loss_sentence(self) -> str:
        """Says so; "" if everything was written."""
        parts = [f"{self.records} records"] if self.records else []
        parts += [f"{self.output_bytes} bytes of the job's output"] if self.output_bytes else []
        return f"The recording is incomplete: {' and '.join(parts)} could not be written." if parts else ""


def read_ending(session: Session) -> Ending:
    """Reads how the job ended, and what its samplers and ranks could not write."""
    ends = [event.facts for event in session.events_named(events.JOB_ENDED)]
    code = ends[-1].get("exit_code") if ends else None
    text = str(ends[-1].get("text") or UNSEEN_END) if ends else ""
    return Ending(code if isinstance(code, int) else None, text, *count_losses(session))


def is_left_running(session: Session, cursor_ns: int | None = None) -> bool:
    """Whether the recording was ended, up to the cursor, while its job went on: detached, and not attached again since."""
    turns = [(event.unix_ns, event.name) for name in _STATE_EVENTS for event in session.events_named(name, cursor_ns)[-1:]]
    return bool(turns) and max(turns)[1] == events.DETACHED


def count_losses(session: Session, cursor_ns: int | None = None) -> Losses:
    """What ranks and samplers had said up to the cursor that they could not write; None is the end.

    On a full disk a rank's table ``probe`` stands still, and its last word says what followed.
    """
    counted: dict[ProcessKey, int] = {}
    for source in session.sources["probe"]:
        known = len(source.array) if cursor_ns is None else source.count_until(cursor_ns)
        lost = int(source.array["lost"][known - 1]) if known else 0
        counted[source.host, source.pid] = counted.get((source.host, source.pid), 0) + lost
    said: dict[ProcessKey, int] = {}
    for event in (*session.events_named(events.LEFT, cursor_ns), *session.events_named(events.GOODBYE, cursor_ns)):
        said[event.host, event.pid] = said.get((event.host, event.pid), 0) + _int_or_zero(event.facts.get("lost"))
    by_ranks = sum(max(counted.get(rank, 0), said.get(rank, 0)) for rank in {*counted, *said})
    ends = [event.facts for event in session.events_named(events.SAMPLER_ENDED, cursor_ns)]
    return Losses(
        by_ranks + sum(_int_or_zero(facts.get("lost_records")) for facts in ends),
        sum(_int_or_zero(facts.get("lost_output_bytes")) for facts in ends),
    )


def _int_or_zero(value: object) -> int:
    return value if isinstance(value, int) else 0
