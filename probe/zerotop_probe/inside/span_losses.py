"""Spans of one rank that could not be written."""

from __future__ import annotations

from collections.abc import Callable

from zerotop_probe.recording import events
from zerotop_probe.recording.rings.ring_files import TableWriter

# Reports of lost spans, so that a disk that is full again and again does not use that room up.
_MOST_EVENTS = 20


class SpanLosses:
    """Follows how many spans were lost, and reports when that begins."""

    def __init__(self, writer: TableWriter, write_event: Callable[..., None]) -> None:
        self._writer = writer
        self._write_event = write_event
        self._is_losing = False
        self._events_left = _MOST_EVENTS
        self.count = 0
        """Spans lost so far."""
        self.count_at_step = 0
        """Those lost before the end of the last step that was recorded."""

    @property
    def has_gap(self) -> bool:
        """Whether spans of the step in progress were lost, or its predecessor's end."""
        return self.count != self.count_at_step

    def follow(self, time_ns: int, step: int, *, ends_step: bool) -> None:
        """Note after a span whether it was lost."""
        lost = self._writer.lost
        if lost == self.count:
            self._is_losing = False
            if ends_step:
                self.count_at_step = lost
            return
        self.count = lost
        if self._events_left and not self._is_losing:
            self._events_left -= 1
            self._write_event(time_ns, events.RecordsLost, step=step, why=self._writer.last_error)
        self._is_losing = True

    def stop_reporting(self) -> None:
        """Write no more events: the files are closed."""
        self._events_left = 0
