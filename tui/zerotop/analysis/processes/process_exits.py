"""When the processes of ranks were over, as far as a recording says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from zerotop.analysis.keys import ProcessKey
from zerotop.session.reader import Event, Session, Source

# Said by the rank itself, and found by the sampler of its node.
_RANK_EVENTS = ("goodbye", "rank_gone")
# Said by a rank that goes on, of which nothing more is told.
_LEFT_EVENT = "left"
_COMMAND_EVENTS = ("job_started", "attached", "joined")


class ProcessExits:
    """The ends that events tell of.

    A command takes with it the ranks of its node when it ends, and those of nodes on which none was started.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self._rank_exits: dict[ProcessKey, list[int]] = {}
        self._left_times: dict[ProcessKey, list[int]] = {}
        self._command_exits: dict[str, list[int]] = {}
        self._commanded_hosts: set[str] = set()
        for event in events:
            if event.name in _RANK_EVENTS:
                pid = event.facts.get("pid")
                process = (event.host, pid if isinstance(pid, int) else event.pid)
                self._rank_exits.setdefault(process, []).append(event.unix_ns)
            elif event.name == _LEFT_EVENT:
                self._left_times.setdefault((event.host, event.pid), []).append(event.unix_ns)
            elif event.name == "job_ended" or (event.name == "parted" and "exit_code" in event.facts):
                self._command_exits.setdefault(event.host, []).append(event.unix_ns)
            elif event.name in _COMMAND_EVENTS:
                self._commanded_hosts.add(event.host)

    def find_exit(self, source: Source) -> int | None:
        """When the process that writes ``source`` was over (unix time); None while nothing says so."""
        return self.find_exit_after(source.host, source.pid, source.created_ns)

    def reported_until(self, source: Source) -> int | None:
        """When it was over, or the probe that writes ``source`` was taken out; None while nothing says so."""
        left = [time for time in self._left_times.get((source.host, source.pid), ()) if time >= source.created_ns]
        known = [*left, *filter(None, [self.find_exit(source)])]
        return min(known, default=None)

    def find_exit_after(self, host: str, pid: int, time_ns: int) -> int | None:
        """When the process that had this number then was over; ends before are those of another that had it."""
        own = self._rank_exits.get((host, pid), [])
        hosts = (host,) if host in self._commanded_hosts else tuple(self._command_exits)
        ends = [*own, *(end for one in hosts for end in self._command_exits.get(one, ()))]
        return min((end for end in ends if end >= time_ns), default=None)


def read_exits(session: Session) -> ProcessExits:
    """All that a session tells of so far; the same object until there is another event."""
    known = _SESSION_EXITS.get(session)
    if known is None or known[0] is not session.events:
        known = _SESSION_EXITS[session] = session.events, ProcessExits(session.events)
    return known[1]


_SESSION_EXITS: WeakKeyDictionary[Session, tuple[Sequence[Event], ProcessExits]] = WeakKeyDictionary()
