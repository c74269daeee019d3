"""The rank processes that are alive at a cursor, and the files that each of them writes."""

from __future__ import annotations

from typing import NamedTuple

from zerotop.analysis.processes.memo import Memo
from zerotop.analysis.processes.process_exits import Ends
from zerotop.session.reader import Event, Session, Source

# A probe makes its tables one after the other, and is put in again no sooner.
_TOGETHER_NS = 100_000_000


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
    return list(_LIVING.at(session, cursor_ns, lambda: _living(session, cursor_ns)))


_LIVING: Memo[list[Process]] = Memo(("begins", "spans", "allocator"))


def _living(session: Session, cursor_ns: int) -> list[Process]:
    born: dict[tuple[str, int], Source] = {}
    for source in session.sources["begins"] + session.sources["spans"] + session.sources["allocator"]:
        key = (source.host, source.rank)
        if source.born_ns <= cursor_ns and (key not in born or born[key].born_ns < source.born_ns):
            born[key] = source
    ends = Ends(event for event in session.events if event.unix_ns <= cursor_ns)
    found = [process_of(source) for source in born.values() if ends.of(source) is None]
    return sorted(found, key=lambda process: (process.rank, process.host))


def table_of(session: Session, name: str, process: Process, at_ns: int | None) -> Source | None:
    """The table of that name that a rank's process wrote at a moment (None: now); None where it has written nothing."""
    found = session.table_of(name, process.host, process.pid, at_ns)
    return found if found is not None and process_of(found) == process else None


def beside(session: Session, name: str, source: Source) -> Source | None:
    """The table of that name that a rank's process wrote while it wrote ``source``."""
    same = session.of_process(source.table, source.host, source.pid)
    later = [other.born_ns for other in same if other.born_ns > source.born_ns]
    return table_of(session, name, process_of(source), min(later) - _TOGETHER_NS if later else None)


def events_of(session: Session, name: str, process: Process, cursor_ns: int) -> list[Event]:
    """The events of that name that a rank's process has recorded up to the cursor, in order."""
    return list(session.told_by(name, *process, cursor_ns))
