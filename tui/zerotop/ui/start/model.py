"""What the start screen shows and where its cursor is. Knows no terminal, so that tests need none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from zerotop.analysis.reports.recording_index import Recording
from zerotop.analysis.reports.recording_summary import Overview
from zerotop.ui.base.start_interfaces import Item, RunningJob

_NOTHING = Overview("")


def _state(recording: Recording) -> tuple[int, int]:
    """Live ones first, then those that failed."""
    about = recording.about or _NOTHING
    failed = bool(about.problem) or about.exit_code != 0
    return (0 if recording.live else 1 if failed else 2), -recording.begin_ns


def _largest(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else -value


ORDERS: dict[str, Callable[[Recording], Any]] = {
    "newest": lambda item: -item.begin_ns,
    "by state": _state,
    "by name": lambda item: item.name.lower(),
    "slowest": lambda item: _largest((item.about or _NOTHING).iteration_s),
    "fullest": lambda item: _largest((item.about or _NOTHING).peak_bytes),
    "longest": lambda item: _largest(item.seconds),
    "largest": lambda item: -item.stamp.bytes,
}
"""What ``o`` goes through, and by what that sorts."""


def key_of(item: Item) -> str:
    """What stays the same about an item while the list changes."""
    return f"pid {item.pid}" if isinstance(item, RunningJob) else str(item.path)


class StartModel:
    """Recordings and running jobs, filtered and sorted, with a cursor that stays on its item."""

    def __init__(self, order: str = "newest") -> None:
        self.order = order if order in ORDERS else "newest"
        self.filter = ""
        self.top = 0  # the first row that is seen
        self.rows: tuple[Item, ...] = ()
        self.known = 0  # recordings, those filtered out too
        self.live = 0
        self._marked: set[str] = set()
        self._place = 0
        self._moved = False  # until then the cursor is on the first row, whichever that is
        self._all: tuple[tuple[Recording, ...], tuple[RunningJob, ...]] = ((), ())

    def show(self, recordings: tuple[Recording, ...], jobs: tuple[RunningJob, ...]) -> None:
        """Takes in what there is now. The cursor stays on its item, or in its place where that is gone."""
        chosen = self.chosen
        self._all = (recordings, jobs)
        self.known, self.live = len(recordings), sum(recording.live for recording in recordings)
        self._marked &= {key_of(recording) for recording in recordings}
        self._arrange(key_of(chosen) if chosen is not None else "")

    def _arrange(self, chosen: str) -> None:
        recordings, jobs = self._all
        items: list[Item] = [*jobs, *self._ordered(recordings)]
        self.rows = tuple(item for item in items if self._fits(item))
        places = [place for place, item in enumerate(self.rows) if key_of(item) == chosen and self._moved]
        self._place = places[0] if places else max(0, min(self._place, len(self.rows) - 1))

    def _ordered(self, recordings: Iterable[Recording]) -> list[Recording]:
        return sorted(recordings, key=ORDERS[self.order])

    def _fits(self, item: Item) -> bool:
        text = searched(item)
        return all(word in text for word in self.filter.lower().split())

    @property
    def place(self) -> int:
        """The cursor's row."""
        return self._place

    @property
    def chosen(self) -> Item | None:
        """The item under the cursor."""
        return self.rows[self._place] if self.rows else None

    @property
    def marked(self) -> tuple[Recording, ...]:
        """Those marked, in the list's order, and whether they are filtered out or not."""
        return tuple(item for item in self._ordered(self._all[0]) if key_of(item) in self._marked)

    def move(self, rows: int) -> None:
        """Down, or up."""
        self.go(self._place + rows)

    def go(self, place: int) -> None:
        """To a row, or the nearest there is."""
        self._moved = True
        self._place = max(0, min(len(self.rows) - 1, place))

    def mark(self) -> None:
        """Marks the chosen recording, or no longer, and goes on."""
        chosen = self.chosen
        if isinstance(chosen, Recording):
            self._marked ^= {key_of(chosen)}
            self.move(1)

    def unmark(self) -> None:
        """Nothing is marked."""
        self._marked.clear()

    def is_marked(self, item: Item) -> bool:
        """Whether it is."""
        return key_of(item) in self._marked

    def set_filter(self, text: str) -> None:
        """Shows only what holds all of these words."""
        chosen = self.chosen
        # What was found stays chosen when all are shown again.
        self._moved |= bool(self.filter) and not text
        self.filter = text
        self._arrange(key_of(chosen) if chosen is not None else "")

    def next_order(self) -> None:
        """Sorts by the next thing to sort by; the cursor goes to the top of it."""
        names = list(ORDERS)
        self.order = names[(names.index(self.order) + 1) % len(names)]
        self._place, self._moved = 0, False
        self._arrange("")

    def scroll(self, height: int) -> None:
        """Moves what is seen, ``height`` rows, so that the cursor is in it."""
        self.top = max(min(self.top, self._place), self._place - height + 1, 0)
        self.top = max(0, min(self.top, len(self.rows) - height))

    def to_compare(self) -> tuple[Recording, ...]:
        """The marked ones, and where only one is, the chosen one with it."""
        marked, chosen = self.marked, self.chosen
        if len(marked) == 1 and isinstance(chosen, Recording) and chosen not in marked:
            return (*marked, chosen)
        return marked


def searched(item: Item) -> str:
    """What a filter looks at, in lower case."""
    words: Iterable[object]
    if isinstance(item, RunningJob):
        words = (item.pid, item.launcher, item.script, f"zero-{item.zero_stage}", "running")
    else:
        about = item.about or _NOTHING
        state = "live" if item.live else f"exit {about.exit_code}"
        offload = (f"zero-{about.zero_stage}", about.offload_optimizer, about.offload_parameters, about.dtype)
        words = (item.name, about.name, state, about.why, about.model, *offload, *about.command)
    return " ".join(map(str, words)).lower()
