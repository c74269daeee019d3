"""The events of a recording by time, kind and writer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, TypeVar

from zerotop_probe.recording.event_base import Event

E = TypeVar("E", bound=Event)


class EventIndex:
    """All events that were read. With many ranks there are tens of thousands, and a query needs few of them."""

    def __init__(self) -> None:
        self.ordered: list[Event] = []
        self._by_kind: dict[type[Event], list[Any]] = {}
        self._by_writer: dict[tuple[type[Event], str, int, int], list[Any]] = {}

    def add(self, fresh: Sequence[Event]) -> None:
        """Add events, in any order."""
        self.ordered = sorted([*self.ordered, *fresh], key=get_event_time)
        changed: dict[int, list[Any]] = {}
        for event in fresh:
            kind, (_, rank, host, pid, *_) = type(event), event.writer
            for index in (self._by_kind.setdefault(kind, []), self._by_writer.setdefault((kind, host, pid, rank), [])):
                index.append(event)
                changed[id(index)] = index
        for index in changed.values():
            index.sort(key=get_event_time)

    def find_all(self, kind: type[E], cursor_ns: int | None = None) -> Sequence[E]:
        """Return the events of a kind up to the cursor (unix time; None: all), by time."""
        return _cut_at(self._by_kind.get(kind, []), cursor_ns)

    def find_written(self, kind: type[E], host: str, pid: int, rank: int, cursor_ns: int) -> Sequence[E]:
        """Return the events of a kind that a rank's process wrote up to the cursor, by time."""
        return _cut_at(self._by_writer.get((kind, host, pid, rank), []), cursor_ns)


def get_event_time(event: Event) -> int:
    """Return the unix time of an event; a key to sort by."""
    return event.unix_ns


def _cut_at(events: list[E], cursor_ns: int | None) -> Sequence[E]:
    return events[:] if cursor_ns is None else events[: bisect_right(events, cursor_ns, key=get_event_time)]
