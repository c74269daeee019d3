"""A recording at a moment: its ranks, its nodes and its end as known then."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, TypeVar

from zerotop.session.events.event_index import get_event_time
from zerotop.session.moments.moment import Moment

if TYPE_CHECKING:
    from zerotop.session.reader import Session

K = TypeVar("K")
V = TypeVar("V")
_MOST_KEPT = 32  # moments: a picture asks for the cursor, for those of peaks, and for those around a failure


class At(Moment):
    """A recording at a moment in unix time. It does not change: what was written later cannot be reached from here."""

    def at(self, time_ns: int) -> At:
        """Return the recording at another moment."""
        return self.session.at(time_ns)


class Moments:
    """The last moments of a recording that were asked for, until more is read."""

    def __init__(self) -> None:
        self._moments: dict[int, At] = {}
        self._created_ns: list[int] = []  # of all tables, in order
        self._known: dict[tuple[int, ...], dict[Any, Any]] = {}  # results between two events

    def forget(self) -> None:
        """More was read."""
        self._moments = {}

    def find(self, session: Session, cursor_ns: int) -> At:
        """Return the recording at a moment."""
        if cursor_ns not in self._moments:
            known = _keep(self._known, self._make_key(session, cursor_ns), {})
            return _keep(self._moments, cursor_ns, At(session, cursor_ns, known))
        return self._moments[cursor_ns]

    def _make_key(self, session: Session, cursor_ns: int) -> tuple[int, ...]:
        """Return the numbers of events and tables, in all and at a moment."""
        tables = sum(map(len, session.sources.values()))
        if tables != len(self._created_ns):
            self._created_ns = sorted(source.created_ns for sources in session.sources.values() for source in sources)
        events = bisect_right(session.events, cursor_ns, key=get_event_time)
        return tables, len(session.events), events, bisect_right(self._created_ns, cursor_ns)


def _keep(kept: dict[K, V], key: K, value: V) -> V:
    """Return what is kept for a key, or else keep this value, and let the first of too many go."""
    if key not in kept and len(kept) >= _MOST_KEPT:
        kept.pop(next(iter(kept)), None)
    return kept.setdefault(key, value)
