"""The events of a recording by time, name and writer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from zerotop.session.events.event_files import Event


class EventIndex:
    """All events that were read. With many ranks there are tens of thousands, and a query needs few of them."""

    def __init__(self) -> None:
        self.ordered: list[Event] = []
        self._by_name: dict[str, list[Event]] = {}
        self._by_writer: dict[tuple[str, str, int, int], list[Event]] = {}

    def add(self, fresh: Sequence[Event]) -> None:
        """Add events, in any order."""
        self.ordered = sorted([*self.ordered, *fresh], key=get_event_time)
        changed: dict[int, list[Event]] = {}
        for event in fresh:
            by_name = self._by_name.setdefault(event.name, [])
            by_writer = self._by_writer.setdefault((event.name, event.host, event.pid, event.rank), [])
            for index in (by_name, by_writer):
                index.append(event)
                changed[id(index)] = index
        for index in changed.values():
            index.sort(key=get_event_time)

    def find_named(self, name: str, cursor_ns: int | None = None) -> Sequence[Event]:
        """Return the events of a name up to the cursor (unix time; None: all), by time."""
        return _cut_at(self._by_name.get(name, []), cursor_ns)

    def find_written(self, name: str, host: str, pid: int, rank: int, cursor_ns: int) -> Sequence[Event]:
        """Return the events of a name that a rank's process wrote up to the cursor, by time."""
        return _cut_at(self._by_writer.get((name, host, pid, rank), []), cursor_ns)


def get_event_time(event: Event) -> int:
    """Return the unix time of an event; a key to sort by."""
    return event.unix_ns


def _cut_at(events: list[Event], cursor_ns: int | None) -> Sequence[Event]:
    return events[:] if cursor_ns is None else events[: bisect_right(events, cursor_ns, key=get_event_time)]
