"""Widgets that the mouse wheel scrolls."""

from __future__ import annotations

from abc import abstractmethod

from textual import events


class Scrollable:
    """A mixin for widgets that scroll their own rows."""

    wheel_rows = 3
    """Rows that one turn of the wheel scrolls."""

    @abstractmethod
    def scroll_rows(self, rows: int) -> None:
        """Scroll down, or up where ``rows`` is negative."""

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.scroll_rows(-self.wheel_rows)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.scroll_rows(self.wheel_rows)
