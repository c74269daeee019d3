"""Panels that are drawn again where the mouse points, and charts that show the values there at the right of their title."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from textual import events

from zerotop.ui.base.frame import Frame
from zerotop.ui.base.frame_widget import FrameWidget
from zerotop.ui.drawing.rows import Row, align_ends
from zerotop.ui.drawing.text import fit_text


class MousePanel(FrameWidget):
    """A panel that is drawn again when the mouse comes to another place of it."""

    _pointed: Any = None  # the place under the mouse

    @abstractmethod
    def find_place(self, x: int, y: int) -> Any:
        """Return the place of the last picture that a cell is in; None outside of all."""

    def on_mouse_move(self, event: events.MouseMove) -> None:
        self._point_at(self.find_place(event.x, event.y))

    def on_leave(self) -> None:
        self._point_at(None)

    def _point_at(self, place: Any) -> None:
        if place != self._pointed:
            self._pointed = place
            self.request_redraw()


class PointedPanel(MousePanel):
    """A panel that knows what is under the mouse, after it was drawn."""

    def find_place(self, x: int, y: int) -> tuple[int, int]:
        return x, y

    @abstractmethod
    def describe_cell(self, frame: Frame, x: int, y: int) -> str:
        """Return the values at a cell of the last picture; empty where it shows none."""

    def draw_cached(self, frame: Frame, width: int, height: int) -> list[Row]:
        rows = super().draw_cached(frame, width, height)
        pointed = self._pointed  # the app's thread may change it
        text = self.describe_cell(frame, *pointed) if pointed is not None and rows else ""
        if not text:
            return rows
        values = fit_text(f" {self.glyphs.to_plain(text)}", width, self.glyphs)
        return [align_ends(rows[0], ((values, "accent"),), width, self.glyphs), *rows[1:]]
