"""How a recording ends: the job's exit code, its last sentence, and records that could not be written."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from zerotop.analysis.keys import ProcessKey
from zerotop_probe.recording import events

if TYPE_CHECKING:
    from zerotop.session.reader import Session

UNSEEN_END = "The job has ended; its exit status is unknown."

# Of these events the last one decides.
_STATE_EVENTS = (events.JOB_ENDED, events.DETACHED, events.ATTACHED)


class Losses(NamedTuple):
    """Records and output that could not be written, as on a full disk."""

    records: int
    output_bytes: int

    @property
    def loss_sentence(self) -> str:
        """One sentence; "" if everything was written."""
        parts = [f"{self.records} records"] if self.records else []
        parts += [f"{self.output_bytes} bytes of the job's output"] if self.output_bytes else []
        return f"The recording is incomplete: {' and '.join(parts)} could not be written." if parts else ""


class Ending(NamedTuple):
    """The end of a recording so far."""

    exit_code: int | None  # None while the job runs, and where nobody saw it
    text: str  # one sentence; "" while the job may run
    losses: Losses

    @property
    def messages(self) -> list[str]:
        """Sentences about an exit code other than 0 and about losses."""
        reason = "" if self.exit_code == 0 else self.text or UNSEEN_END
        return [sentence for sentence in (reason, self.losses.loss_sentence) if sentence]


def read_ending(session: Session) -> Ending:
    """Return how the job ended, and what its samplers and ranks could not write."""
    ended = session.events_named(events.JOB_ENDED)
    facts = ended[-1].facts if ended else {}
    code = facts.get("exit_code")
    text = str(facts.get("text") or UNSEEN_END) if ended else ""
    return Ending(code if isinstance(code, int) else None, text, count_losses(session))


def is_left_running(session: Session, cursor_ns: int | None = None) -> bool:
    """Return whether by the cursor the recording had ended while its job went on: detached, and not attached again."""
    last = [(event.unix_ns, event.name) for name in _STATE_EVENTS for event in session.events_named(name, cursor_ns)[-1:]]
    return bool(last) and max(last)[1] == events.DETACHED


def count_losses(session: Session, cursor_ns: int | None = None) -> Losses:
    """Return what ranks and samplers had reported as lost up to the cursor; None is the end.

    On a full disk a rank cannot append to its table ``probe`` either: its last event has the total.
    """
    sampled: dict[ProcessKey, int] = {}
    for source in session.sources["probe"]:
        count = len(source.array) if cursor_ns is None else source.count_until(cursor_ns)
        lost = int(source.array["lost"][count - 1]) if count else 0
        sampled[source.host, source.pid] = sampled.get((source.host, source.pid), 0) + lost
    reported: dict[ProcessKey, int] = {}
    for event in (*session.events_named(events.LEFT, cursor_ns), *session.events_named(events.GOODBYE, cursor_ns)):
        reported[event.host, event.pid] = reported.get((event.host, event.pid), 0) + _int_or_zero(event.facts.get("lost"))
    by_ranks = sum(max(sampled.get(rank, 0), reported.get(rank, 0)) for rank in {*sampled, *reported})
    ended = [event.facts for event in session.events_named(events.SAMPLER_ENDED, cursor_ns)]
    return Losses(
        by_ranks + sum(_int_or_zero(facts.get("lost_records")) for facts in ended),
        sum(_int_or_zero(facts.get("lost_output_bytes")) for facts in ended),
    )


def _int_or_zero(value: object) -> int:
    return value if isinstance(value, int) else 0
