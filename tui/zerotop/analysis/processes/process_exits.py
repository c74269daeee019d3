"""When the processes of ranks were over, as far as a recording says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from zerotop.session.reader import Event, Session, Source

# Said by the rank itself, and found by the sampler of its node.
_OF_RANKS = ("goodbye", "rank_gone")
# Said by a rank that goes on, of which nothing more is told.
_LEFT = "left"
_COMMANDED = ("job_started", "attached", "joined")


class Ends:
    """The ends that events tell of.

    A command takes with it the ranks of its node when it ends, and those of nodes on which none was started.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self._ranks: dict[tuple[str, int], list[int]] = {}
        self._left: dict[tuple[str, int], list[int]] = {}
        self._commands: dict[str, list[int]] = {}
        self._commanded: set[str] = set()
        for event in events:
            if event.name in _OF_RANKS:
                pid = event.facts.get("pid")
                process = (event.host, pid if isinstance(pid, int) else event.pid)
                self._ranks.setdefault(process, []).append(event.unix_ns)
            elif event.name == _LEFT:
                self._left.setdefault((event.host, event.pid), []).append(event.unix_ns)
            elif event.name == "job_ended" or (event.name == "parted" and "exit_code" in event.facts):
                self._commands.setdefault(event.host, []).append(event.unix_ns)
            elif event.name in _COMMANDED:
                self._commanded.add(event.host)

    def of(self, source: Source) -> int | None:
        """When the process that writes ``source`` was over (unix time); None while nothing says so."""
        return self.after(source.host, source.pid, source.born_ns)

    def told_until(self, source: Source) -> int | None:
        """When it was over, or the probe that writes ``source`` was taken out; None while nothing says so."""
        left = [time for time in self._left.get((source.host, source.pid), ()) if time >= source.born_ns]
        known = [*left, *filter(None, [self.of(source)])]
        return min(known, default=None)

    def after(self, host: str, pid: int, time_ns: int) -> int | None:
        """When the process that had this number then was over; ends before are those of another that had it."""
        own = self._ranks.get((host, pid), [])
        hosts = (host,) if host in self._commanded else tuple(self._commands)
        ends = [*own, *(end for one in hosts for end in self._commands.get(one, ()))]
        return min((end for end in ends if end >= time_ns), default=None)


def ends_of(session: Session) -> Ends:
    """All that a session tells of so far; the same object until there is another event."""
    known = _KNOWN.get(session)
    if known is None or known[0] is not session.events:
        known = _KNOWN[session] = session.events, Ends(session.events)
    return known[1]


_KNOWN: WeakKeyDictionary[Session, tuple[Sequence[Event], Ends]] = WeakKeyDictionary()
