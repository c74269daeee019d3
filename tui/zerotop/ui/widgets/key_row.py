"""A picture with a row of keys at its bottom, which the mouse presses."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events

from zerotop.ui.base.footer import Key, draw_keys
from zerotop.ui.drawing.rows import Row
from zerotop.ui.widgets.frame_widget import RowWidget


class KeyRow(RowWidget):
    """Actions without a prefix are the screen's."""

    _click_boxes: Sequence[tuple[int, int, str]] = ()

    def draw_key_row(self, keys: Sequence[Key], width: int) -> Row:
        """The row, to be the last of the picture."""
        row, self._click_boxes = draw_keys(keys, width, self.glyphs)
        return row

    def on_click(self, event: events.Click) -> None:
        if event.y != self.size.height - 1:
            return
        for begin, end, action in self._click_boxes:
            if begin <= event.x < end:
                self.call_later(self.app.run_action, action, self.screen)
