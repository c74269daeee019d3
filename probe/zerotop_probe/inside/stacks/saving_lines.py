"""Note which lines of the job's own code save checkpoints: a save of a few milliseconds is hardly ever sampled."""

from __future__ import annotations

import sys
from collections.abc import Callable

from zerotop_probe.inside.guard import CostMeter, Guard
from zerotop_probe.inside.stacks.own_lines import OwnLines, OwnPlace
from zerotop_probe.recording import events

# The most lines that are distinguished.
_MOST_LINES = 16


class SavingLines:
    """Counts the saves by line. A line's event is written with its first, second, fourth, eighth save, and so on."""

    def __init__(self, meter: CostMeter) -> None:
        self._guard = Guard("lines that save", meter)
        self._write_event: Callable[..., None] | None = None
        self._own_lines = OwnLines()
        self._saves: dict[OwnPlace | None, int] = {}

    def begin_recording(self, write_event: Callable[..., None], *, names_lines: bool) -> None:
        """Count for another recording from now on; ``names_lines``: whether lines may be recorded."""
        self._write_event, self._saves = write_event if names_lines else None, {}

    def note_save(self, time_ns: int) -> None:
        """Note the line that begins to save at a time. An error disables this and leaves the save's own hook on."""
        if self._write_event is None or not self._guard.is_on:
            return
        try:
            place = self._own_lines.find_place(sys._getframe())
            if place not in self._saves and len(self._saves) == _MOST_LINES:
                return
            saves = self._saves[place] = self._saves.get(place, 0) + 1
            if saves & (saves - 1) == 0:
                line = place._asdict() if place is not None else {}
                self._write_event(time_ns, events.CheckpointLine, saves=saves, **line)
        except BaseException as error:
            self._guard.settle(error)
