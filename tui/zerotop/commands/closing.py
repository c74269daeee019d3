"""What is said when a job has ended: how it did, and what its recording lacks."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from zerotop_probe.recording import events

if TYPE_CHECKING:
    from zerotop.session.reader import Session

_NOBODY_SAW = "Nobody saw how the job ended: its exit code is not known."


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
    text = str(ends[-1].get("text") or _NOBODY_SAW) if ends else ""
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


def loss(records: int, output_bytes: int) -> str:
    """A sentence about what could not be written; "" if everything was."""
    parts = [f"{records} records"] if records else []
    parts += [f"{output_bytes} bytes of the job's output"] if output_bytes else []
    return f"The recording is incomplete: {' and '.join(parts)} could not be written." if parts else ""


def last_words(end: Ending) -> list[str]:
    """The sentences worth saying: nothing of what went well."""
    how = "" if end.exit_code == 0 else end.text or _NOBODY_SAW
    return [words for words in (how, loss(end.lost_records, end.lost_output_bytes)) if words]


def say(*sentences: str) -> None:
    """Writes lines to standard error. Where that is closed or full, the exit code stays what it was."""
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    text = "".join(f"zerotop: {sentence}\n" for sentence in sentences)
    with suppress(OSError):
        os.write(2, text.encode(encoding, "backslashreplace"))
