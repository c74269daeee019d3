"""Widgets that the mouse wheel scrolls."""

from __future__ import annotations

from abc import abstractmethod

from textual import events


class Wheel:
    """A mixin for widgets that answer to the mouse wheel."""

    @abstractmethod
    def turn_wheel(self, event: events.MouseEvent, direction: int) -> None:
        """Answer to one turn down (1) or up (-1)."""

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self.turn_wheel(event, -1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self.turn_wheel(event, 1)


class Scrollable(Wheel):
    """A mixin for widgets that scroll their own rows."""

    wheel_rows = 3
    """Rows that one turn of the wheel scrolls."""

    @abstractmethod
    def scroll_rows(self, rows: int) -> None:
        """Scroll down, or up where ``rows`` is negative."""

    def turn_wheel(self, event: events.MouseEvent, direction: int) -> None:
        event.stop()
        self.scroll_rows(direction * self.wheel_rows)
