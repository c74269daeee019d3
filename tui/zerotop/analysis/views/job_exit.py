"""The end of a recording: the job's exit code and message, and records that could not be written."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from zerotop.analysis.formatting import format_count
from zerotop.recording.events.event_index import get_event_time
from zerotop.recording.keys import ProcessKey
from zerotop_probe.recording import events

if TYPE_CHECKING:
    from zerotop.recording.moments.at import At
    from zerotop.recording.reader import Recording

UNSEEN_END = "Exit status unknown: the job's end was not recorded."

# The latest of these is the state.
_STATE_EVENTS: tuple[type[events.Event], ...] = (events.JobEnded, events.Detached, events.Attached)


class Ending(NamedTuple):
    """The end of a recording, as far as it is recorded."""

    exit_code: int | None  # None while the job runs and where unknown
    text: str  # one sentence; "" while the job may run
    lost_records: int
    lost_output_bytes: int


class Losses(NamedTuple):
    """Records and output that could not be written, for example to a full disk."""

    records: int
    output_bytes: int

    @property
    def loss_sentence(self) -> str:
        """Sentence about the losses; "" without any."""
        parts = [format_count(self.records, "record")] if self.records else []
        parts += [f"{self.output_bytes} bytes of the job's output"] if self.output_bytes else []
        return f"The recording is incomplete: {' and '.join(parts)} could not be written." if parts else ""


def read_ending(recording: Recording) -> Ending:
    """Read how the job ended, and the losses that samplers and ranks reported."""
    ends = recording.events_of(events.JobEnded)
    code, text = (ends[-1].exit_code, ends[-1].text or UNSEEN_END) if ends else (None, "")
    return Ending(code, text, *count_losses(recording.at()))


def is_left_running(at: At) -> bool:
    """Whether the recording was detached from a running job, and not attached again up to the cursor."""
    states = [event for kind in _STATE_EVENTS for event in at.events_of(kind)[-1:]]
    return bool(states) and isinstance(max(states, key=get_event_time), events.Detached)


def count_losses(at: At) -> Losses:
    """Count the records that ranks and samplers could not write, by their reports.

    On a full disk a rank's table ``probe`` stops growing too; its last event has the rest.
    """
    counted: dict[ProcessKey, int] = {}
    for source in at.sources["probe"]:
        lost = sum((source.array if at.cursor_ns is None else source.until(at.cursor_ns))["lost"][-1:].tolist())
        counted[source.host, source.pid] = counted.get((source.host, source.pid), 0) + lost
    reported: dict[ProcessKey, int] = {}
    for event in (*at.events_of(events.Left), *at.events_of(events.Goodbye)):
        key = event.process_key
        reported[key] = reported.get(key, 0) + (event.lost or 0)
    by_ranks = sum(max(counted.get(key, 0), reported.get(key, 0)) for key in {*counted, *reported})
    ends = at.events_of(events.SamplerEnded)
    return Losses(by_ranks + sum(end.lost_records or 0 for end in ends), sum(end.lost_output_bytes or 0 for end in ends))
