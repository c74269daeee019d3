"""The output screen's search bar."""

from __future__ import annotations

from functools import partial

from textual import events
from textual.message import Message

from zerotop.ui.base.frame import Frame
from zerotop.ui.base.frame_widget import FrameWidget
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row
from zerotop.ui.output.drawing import draw_search
from zerotop.ui.output.model import OutputView


class Find(FrameWidget, can_focus=True):
    """A row to type the search text in."""

    class Typed(Message):
        """The search text changed."""

    class Accepted(Message):
        """The search text was confirmed."""

    class Left(Message):
        """The search was cancelled."""

    def __init__(self, glyphs: Glyphs, output_view: OutputView, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self.output_view = output_view

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        return [draw_search(self.output_view.describe_search(), width, self.glyphs)]

    def on_focus(self) -> None:
        self.output_view.start_typing()
        super().on_focus()

    def on_blur(self) -> None:
        self.output_view.stop_typing()
        super().on_blur()

    def on_key(self, event: events.Key) -> None:
        text = self.output_view.typed_text or ""
        if event.is_printable and event.character is not None:
            self._type_text(text + event.character)
        elif event.key == "backspace":
            self._type_text(text[:-1])
        elif event.key == "ctrl+u":
            self._type_text("")
        elif event.key == "enter":
            self.post_message(self.Accepted())
        elif event.key == "escape":
            self.post_message(self.Left())
        else:
            return
        event.stop()
        event.prevent_default()

    def on_paste(self, event: events.Paste) -> None:
        event.stop()
        self._type_text((self.output_view.typed_text or "") + event.text.split("\n")[0])

    def _type_text(self, text: str) -> None:
        # At once: the next key may come before the screen handles the message.
        self.output_view.typed_text = text
        self.request_redraw(partial(self.output_view.type_text, text))
        self.post_message(self.Typed())
