"""The state of the start screen, without a terminal: rows, cursor, filter, order and marks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from zerotop.analysis.reports.recording_index import ListedRecording
from zerotop.analysis.reports.recording_summary import Overview
from zerotop.ui.base.start_interfaces import LibraryItem, RunningJob

NO_OVERVIEW = Overview("")


def _state_key(recording: ListedRecording) -> tuple[int, int]:
    """Sort live recordings first, then failed ones."""
    about = recording.overview or NO_OVERVIEW
    failed = bool(about.problem) or about.exit_code != 0
    return (0 if recording.is_live else 1 if failed else 2), -recording.begin_ns


def _descending_key(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else -value


ORDERS: dict[str, Callable[[ListedRecording], Any]] = {
    "newest": lambda item: -item.begin_ns,
    "by state": _state_key,
    "by name": lambda item: item.name.lower(),
    "slowest": lambda item: _descending_key((item.overview or NO_OVERVIEW).iteration_s),
    "fullest": lambda item: _descending_key((item.overview or NO_OVERVIEW).peak_bytes),
    "longest": lambda item: _descending_key(item.duration_s),
    "largest": lambda item: -item.stamp.bytes,
}
"""The orders that ``o`` cycles through, with their sort keys."""


def describe_order(order: str) -> str:
    """Return an order as a title: ``newest first``, ``by name``."""
    return order if order.startswith("by ") else f"{order} first"


def make_key(item: LibraryItem) -> str:
    """Return a key that identifies an item while the list changes."""
    return f"pid {item.pid}" if isinstance(item, RunningJob) else str(item.path)


class StartModel:
    """Recordings and running jobs, filtered and sorted, with a cursor that stays on its item."""

    def __init__(self, order: str = "newest") -> None:
        self.order = order if order in ORDERS else "newest"
        self.filter_text = ""
        self.top_row = 0  # the first visible row
        self.rows: tuple[LibraryItem, ...] = ()
        self.recording_count = 0  # including those filtered out
        self.live_count = 0
        self._marked_keys: set[str] = set()
        self._cursor_row = 0
        self._cursor_moved = False  # until then the cursor stays on the first row
        self._all_items: tuple[tuple[ListedRecording, ...], tuple[RunningJob, ...]] = ((), ())

    def update_items(self, recordings: tuple[ListedRecording, ...], jobs: tuple[RunningJob, ...]) -> None:
        """Update the list. The cursor stays on its item, or in its row if the item is gone."""
        chosen = self.chosen_item
        self._all_items = (recordings, jobs)
        self.recording_count, self.live_count = len(recordings), sum(recording.is_live for recording in recordings)
        self._marked_keys &= {make_key(recording) for recording in recordings}
        self._update_rows(make_key(chosen) if chosen is not None else "")

    def _update_rows(self, chosen: str) -> None:
        recordings, jobs = self._all_items
        items: list[LibraryItem] = [*jobs, *self._sort_recordings(recordings)]
        self.rows = tuple(item for item in items if self._matches_filter(item))
        places = [place for place, item in enumerate(self.rows) if make_key(item) == chosen and self._cursor_moved]
        self._cursor_row = places[0] if places else max(0, min(self._cursor_row, len(self.rows) - 1))

    def _sort_recordings(self, recordings: Iterable[ListedRecording]) -> list[ListedRecording]:
        return sorted(recordings, key=ORDERS[self.order])

    def _matches_filter(self, item: LibraryItem) -> bool:
        text = build_search_text(item)
        return all(word in text for word in self.filter_text.lower().split())

    @property
    def cursor_row(self) -> int:
        return self._cursor_row

    @property
    def chosen_item(self) -> LibraryItem | None:
        """The item under the cursor."""
        return self.rows[self._cursor_row] if self.rows else None

    @property
    def marked_recordings(self) -> tuple[ListedRecording, ...]:
        """The marked recordings in the list's order, including those filtered out."""
        return tuple(item for item in self._sort_recordings(self._all_items[0]) if make_key(item) in self._marked_keys)

    def move_cursor(self, rows: int) -> None:
        """Move down, or up if negative."""
        self.go_to_row(self._cursor_row + rows)

    def go_to_row(self, row: int) -> None:
        """Go to a row, or the nearest existing one."""
        self._cursor_moved = True
        self._cursor_row = max(0, min(len(self.rows) - 1, row))

    def toggle_mark(self) -> None:
        """Mark or unmark the chosen recording, and go to the next row."""
        chosen = self.chosen_item
        if isinstance(chosen, ListedRecording):
            self._marked_keys ^= {make_key(chosen)}
            self.move_cursor(1)

    def clear_marks(self) -> None:
        self._marked_keys.clear()

    def is_marked(self, item: LibraryItem) -> bool:
        return make_key(item) in self._marked_keys

    def set_filter(self, text: str) -> None:
        """Show only the items that contain all of these words."""
        chosen = self.chosen_item
        # The chosen item stays chosen when the filter is cleared.
        self._cursor_moved |= bool(self.filter_text) and not text
        self.filter_text = text
        self._update_rows(make_key(chosen) if chosen is not None else "")

    def choose_next_order(self) -> None:
        """Switch to the next order, with the cursor at the top."""
        names = list(ORDERS)
        self.order = names[(names.index(self.order) + 1) % len(names)]
        self._cursor_row, self._cursor_moved = 0, False
        self._update_rows("")

    def scroll_to_cursor(self, height: int) -> None:
        """Scroll until the cursor is within the ``height`` visible rows."""
        self.top_row = max(min(self.top_row, self._cursor_row), self._cursor_row - height + 1, 0)
        self.top_row = max(0, min(self.top_row, len(self.rows) - height))

    def choose_compared(self) -> tuple[ListedRecording, ...]:
        """Return the marked recordings; if only one is marked, the chosen one too."""
        marked, chosen = self.marked_recordings, self.chosen_item
        if len(marked) == 1 and isinstance(chosen, ListedRecording) and chosen not in marked:
            return (*marked, chosen)
        return marked


def build_search_text(item: LibraryItem) -> str:
    """Return the text that the filter searches, in lower case."""
    words: Iterable[object]
    if isinstance(item, RunningJob):
        words = (item.pid, item.launcher, item.script, f"zero-{item.zero_stage}", "running")
    else:
        about = item.overview or NO_OVERVIEW
        state = "live" if item.is_live else f"exit {about.exit_code}"
        setup = about.setup_text if about.is_loop else f"zero-{about.zero_stage}"
        offload = (setup, about.offload_optimizer, about.offload_parameters, about.precision_text)
        words = (item.name, about.name, state, about.why, about.model, *offload, *about.command)
    return " ".join(map(str, words)).lower()
