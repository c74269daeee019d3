"""The rank processes that are alive at a cursor, and the tables that each of them writes."""

from __future__ import annotations

from typing import NamedTuple

from zerotop.analysis.processes.memo import CursorMemo
from zerotop.analysis.processes.process_exits import read_exits_until
from zerotop.session.events.event_files import E
from zerotop.session.reader import Session, Source

# A probe creates its tables within this time, and cannot enter again sooner.
_TOGETHER_NS = 100_000_000


class RankProcess(NamedTuple):
    """A rank's process on its node."""

    host: str
    pid: int
    rank: int


def identify_process(source: Source) -> RankProcess:
    """Return the rank process that writes a table."""
    return RankProcess(source.host, source.pid, source.rank)


def find_alive_processes(session: Session, cursor_ns: int) -> list[RankProcess]:
    """Return the rank processes that hold memory at the cursor, by rank: neither gone nor replaced by a restart."""
    return list(_ALIVE.value_at(session, cursor_ns, lambda: _compute_alive(session, cursor_ns)))


_ALIVE: CursorMemo[list[RankProcess]] = CursorMemo(("begins", "spans", "allocator"))


def _compute_alive(session: Session, cursor_ns: int) -> list[RankProcess]:
    exits = read_exits_until(session, cursor_ns)
    alive = [identify_process(source) for source in find_latest(session, cursor_ns) if exits.find_exit(source) is None]
    return sorted(alive, key=lambda process: (process.rank, process.host))


def find_latest(session: Session, cursor_ns: int) -> list[Source]:
    """Return a table of the last process of each rank up to the cursor, alive or not."""
    latest: dict[tuple[str, int], Source] = {}  # by host and rank
    for source in session.sources["begins"] + session.sources["spans"] + session.sources["allocator"]:
        key = (source.host, source.rank)
        if source.created_ns <= cursor_ns and (key not in latest or latest[key].created_ns < source.created_ns):
            latest[key] = source
    return list(latest.values())


def find_table(session: Session, name: str, process: RankProcess, at_ns: int | None) -> Source | None:
    """Return the table of that name that a rank process wrote at a moment (None: now); None without any."""
    source = session.find_source(name, process.host, process.pid, at_ns)
    return source if source is not None and identify_process(source) == process else None


def find_sibling_table(session: Session, name: str, source: Source) -> Source | None:
    """Return the table of that name that a rank process wrote at the same time as ``source``."""
    tables = session.process_sources(source.table, source.host, source.pid)
    later = [other.created_ns for other in tables if other.created_ns > source.created_ns]
    return find_table(session, name, identify_process(source), min(later) - _TOGETHER_NS if later else None)


def read_events(session: Session, kind: type[E], process: RankProcess, cursor_ns: int) -> list[E]:
    """Return the events of that kind that a rank process recorded up to the cursor, in order."""
    return list(session.process_events(kind, *process, cursor_ns))
