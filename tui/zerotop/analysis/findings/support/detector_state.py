"""The memory of detectors between calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
# Findings of one kind that are all reported.
MOST_REPORTS = 20


class DetectorState:
    """The memory of detectors between calls, so that they read each record once."""

    def __init__(self) -> None:
        self._states: dict[Any, Any] = {}
        self.windows: dict[Any, Any] = {}
        """The windows of detectors, by detector and host."""
        self.reported: set[Hashable] = set()
        """Findings that are not to be reported again, by name or by name and details."""

    def get_state(self, factory: Callable[[], T], key: Hashable = None) -> T:
        """Return the object that ``factory`` made on the first call with the same arguments."""
        if (factory, key) not in self._states:
            self._states[factory, key] = factory()
        state: T = self._states[factory, key]
        return state

    def read_new_items(self, items: Sequence[T], key: str) -> Sequence[T]:
        """Return the items of a growing sequence that have not been returned before for ``key``."""
        state = self.get_state(_Position, key)
        begin, state.count = state.count, max(len(items), state.count)
        return items[begin:]

    def count_report(self, name: str) -> bool:
        """Count one more finding of a kind; return whether to report it.

        The first MOST_REPORTS are reported, then one at each doubling: a constant repetition is no news.
        """
        state = self.get_state(_Position, f"{name} reports")
        state.count += 1
        return state.count <= MOST_REPORTS or state.count.bit_count() == 1


class _Position:
    count = 0
