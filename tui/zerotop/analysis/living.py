"""The rank processes that are alive at a cursor, and the files that each of them writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zerotop.session.reader import Event, Session, Source


class Process(NamedTuple):
    """A rank's process on its node."""

    host: str
    pid: int
    rank: int


def process_of(source: Source) -> Process:
    """The rank's process that writes a file."""
    return Process(source.host, source.pid, source.rank)


def living(session: Session, cursor_ns: int) -> list[Process]:
    """The rank processes that hold memory at the cursor, by rank.

    Left out are those that are gone or have said goodbye, and those in whose place the job has been started again.
    """
    born: dict[tuple[str, int], Source] = {}
    for source in session.sources["begins"] + session.sources["spans"] + session.sources["allocator"]:
        key = (source.host, source.rank)
        if source.born_ns <= cursor_ns and (key not in born or born[key].born_ns < source.born_ns):
            born[key] = source
    ends = [e for e in session.events if e.name in ("goodbye", "rank_gone", "job_ended") and e.unix_ns <= cursor_ns]
    found = [process_of(source) for source in born.values() if not _is_gone(ends, source)]
    return sorted(found, key=lambda process: (process.rank, process.host))


def _is_gone(ends: Iterable[Event], source: Source) -> bool:
    return any(
        event.unix_ns >= source.born_ns
        and (event.name == "job_ended" or (event.host, event.facts.get("pid", event.pid)) == (source.host, source.pid))
        for event in ends
    )


def table_of(session: Session, name: str, process: Process) -> Source | None:
    """The table of that name that a rank's process writes; None where it has written nothing."""
    for source in session.sources[name]:
        if process_of(source) == process:
            return source
    return None


def events_of(session: Session, name: str, process: Process, cursor_ns: int) -> list[Event]:
    """The events of that name that a rank's process has recorded up to the cursor, in order."""
    return [
        event
        for event in session.events
        if event.name == name
        and event.unix_ns <= cursor_ns
        and (event.host, event.pid, event.rank) == process
    ]
