"""The events of a recording: files of JSON lines, complete or still growing."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TypeVar

from zerotop.recording.events.event_schema import drop_invalid_facts
from zerotop.recording.headers import DAMAGE_ERRORS, Clocks, parse_integer, parse_writer, read_header
from zerotop.recording.record_check import MAX_AGE_NS
from zerotop.recording.storage import Folder
from zerotop_probe.recording.event_base import EVENTS, Event, UnknownEvent
from zerotop_probe.recording.writer import Identity

_MAX_LINE_BYTES = 1 << 22  # of an event; those of a thousand ranks have 100 KB
_MAX_FILE_BYTES = 1 << 26  # of a file of events
_MAX_EVENT_BYTES = 1 << 29  # that the events of a recording may take in memory, by the estimate
_VALUE_BYTES = 100  # a number or a string as a Python object, with its place in a list or dictionary


E = TypeVar("E", bound=Event)


def select_events(events: Sequence[E], begin_ns: int, end_ns: int) -> Sequence[E]:
    """Return the events of a window of time, both ends included, of events in order of time (unix nanoseconds)."""
    first = bisect_left(events, begin_ns, key=_get_time)
    return events[first : bisect_right(events, end_ns, first, key=_get_time)]


def _get_time(event: Event) -> int:
    return event.unix_ns


class EventBudget:
    """The memory left for the events of a recording, as an estimate in bytes."""

    def __init__(self) -> None:
        self.bytes = _MAX_EVENT_BYTES

    def admits(self, line: bytes) -> bool:
        """Whether a line may be parsed, and reserve its memory if so."""
        needed = len(line) + _VALUE_BYTES * (line.count(b",") + line.count(b"[") + line.count(b"{"))
        admitted = needed <= self.bytes
        self.bytes -= needed if admitted else 0
        return admitted


class EventFile:
    """A JSON-lines file that may grow. Invalid lines are skipped and counted; invalid facts become None and count too."""

    def __init__(self, folder: Folder, name: str, clocks: Clocks, budget: EventBudget) -> None:
        self.name = name
        self._folder = folder
        self.damaged_lines = 0
        self._clocks = clocks
        self._budget = budget
        self._position = 0
        self._is_in_long_line = False
        self._writer: Identity | None = None
        self._created_ns = self._offset_ns = 0

    def read_new(self) -> list[Event]:
        """Return the events of the complete lines added since the last call."""
        events: list[Event] = []
        try:
            # Events are rare: most calls find none, and reading the size takes a tenth of the time of opening the file.
            while min(self._folder.file_size(self.name), _MAX_FILE_BYTES) > self._position:
                data = self._folder.read_bytes(self.name, self._position, self._position + _MAX_LINE_BYTES)
                lines = data[: data.rfind(b"\n") + 1]
                if not lines and len(data) < _MAX_LINE_BYTES:
                    break
                self._position += len(lines) or len(data)
                events += self._parse_lines(lines)
                # A longer line is no event: it counts once, and its rest is skipped.
                self.damaged_lines += not lines and not self._is_in_long_line
                self._is_in_long_line = not lines
        except OSError:
            pass
        return events

    def _parse_lines(self, lines: bytes) -> list[Event]:
        whole = lines.split(b"\n")[1 if self._is_in_long_line else 0 :]
        events = [self._parse_event(line) for line in whole if line.strip()]
        return [event for event in events if event is not None]

    def _parse_event(self, line: bytes) -> Event | None:
        try:
            if self._writer is None:
                header = read_header(line, self.name)
                self._created_ns = parse_integer(header["clock"]["monotonic_ns"])
                self._writer, self._offset_ns = parse_writer(header), self._clocks.find_offset(header)
                return None
            if not self._budget.admits(line):
                raise ValueError("the recording has too many events")
            facts = json.loads(line)
            time_ns, name = parse_integer(facts.pop("time_ns")), str(facts.pop("event"))
            if abs(time_ns - self._created_ns) > MAX_AGE_NS:
                raise ValueError("the time is impossible")
            declared, unix_ns = EVENTS.get(name), time_ns + self._offset_ns
            self.damaged_lines += drop_invalid_facts(declared or UnknownEvent, facts)
            if declared is None:
                return UnknownEvent(name, facts, unix_ns, self._writer)
            return declared(facts, unix_ns, self._writer)
        except DAMAGE_ERRORS:
            self.damaged_lines += 1
            return None
