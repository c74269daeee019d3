"""Pictures with a row of actions at their bottom, which the mouse presses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from textual import events

from zerotop.ui.base.bars.footer import draw_keys
from zerotop.ui.base.bars.footer_keys import choose_keys
from zerotop.ui.base.frame_widget import RowWidget
from zerotop.ui.drawing.rows import Row


class ClickableRow(RowWidget):
    """A widget whose last row has parts that run an action when clicked."""

    _click_boxes: Sequence[tuple[int, int, str]] = ()

    def draw_key_row(self, labels: Mapping[str, str], width: int) -> Row:
        """Return the screen's footer. For ``labels`` see :func:`choose_keys`."""
        row, self._click_boxes = draw_keys(choose_keys(self.screen, labels), width, self.glyphs)
        return row

    def on_click(self, event: events.Click) -> None:
        for begin, end, action in self._click_boxes:
            if event.y == self.size.height - 1 and begin <= event.x < end:
                self.app.call_later(self.app.run_action, action)


class KeyRow(ClickableRow):
    """A whole screen as one picture, with the keys in its last row."""
