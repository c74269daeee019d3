"""Exits of rank processes, as far as they are recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from zerotop.analysis.keys import ProcessKey
from zerotop.session.reader import Event, Session, Source

# Recorded by the rank itself, and by the sampler of its node.
_RANK_EVENTS = ("goodbye", "rank_gone")
# Recorded when the probe leaves a rank that goes on.
_LEFT_EVENT = "left"
_COMMAND_EVENTS = ("job_started", "attached", "joined")


class ProcessExits:
    """Exits recorded in events.

    The end of a command ends the ranks of its node, and of nodes without a command of their own.
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
        """Return when the process that writes ``source`` exited (unix time); None if not recorded."""
        return self.find_exit_after(source.host, source.pid, source.created_ns)

    def reported_until(self, source: Source) -> int | None:
        """Return when the process that writes ``source`` exited or the probe left it; None if not recorded."""
        left = [time for time in self._left_times.get((source.host, source.pid), ()) if time >= source.created_ns]
        return min([*left, *filter(None, [self.find_exit(source)])], default=None)

    def find_exit_after(self, host: str, pid: int, time_ns: int) -> int | None:
        """Return the first exit of this pid after ``time_ns``: earlier ones are of other processes."""
        own = self._rank_exits.get((host, pid), [])
        hosts = (host,) if host in self._commanded_hosts else tuple(self._command_exits)
        ends = [*own, *(end for command_host in hosts for end in self._command_exits.get(command_host, ()))]
        return min((end for end in ends if end >= time_ns), default=None)


def read_exits(session: Session) -> ProcessExits:
    """Return the exits of a session so far; the same object until there is another event."""
    cached = _SESSION_EXITS.get(session)
    if cached is None or cached[0] is not session.events:
        cached = _SESSION_EXITS[session] = session.events, ProcessExits(session.events)
    return cached[1]


_SESSION_EXITS: WeakKeyDictionary[Session, tuple[Sequence[Event], ProcessExits]] = WeakKeyDictionary()
