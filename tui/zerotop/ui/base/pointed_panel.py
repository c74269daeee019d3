"""Charts that show the values under the mouse at the right of their title."""

from __future__ import annotations

from abc import abstractmethod

from textual import events

from zerotop.ui.base.frame import Frame
from zerotop.ui.base.frame_widget import FrameWidget
from zerotop.ui.drawing.rows import Row, align_ends
from zerotop.ui.drawing.text import fit_text


class PointedPanel(FrameWidget):
    """A panel that knows what is under the mouse, after it was drawn."""

    _pointed: tuple[int, int] | None = None  # the cell under the mouse

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

    def on_mouse_move(self, event: events.MouseMove) -> None:
        self._point_at((event.x, event.y))

    def on_leave(self) -> None:
        self._point_at(None)

    def _point_at(self, cell: tuple[int, int] | None) -> None:
        if cell != self._pointed:
            self._pointed = cell
            self.request_redraw()
