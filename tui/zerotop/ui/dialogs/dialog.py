"""The base of all dialogs."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, TypeVar

from rich.console import RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from zerotop.ui.base.bars.footer_keys import bind
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.text import sanitize

Result = TypeVar("Result")


class Dialog(ModalScreen[Result]):
    """A titled box in the middle of the screen; escape closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [bind("escape", "close", "dialog.close", "Close", "Back to the screen")]

    def __init__(self, title: str, glyphs: Glyphs, *, page: bool = False) -> None:
        super().__init__(classes=("page " if page else "") + ("ascii" if glyphs.name == "ascii" else ""))
        self.heading = title
        self.glyphs = glyphs

    def compose(self) -> ComposeResult:
        with Vertical(id="box") as box:
            box.border_title = self.heading
            yield from self.compose_box()

    @abstractmethod
    def compose_box(self) -> ComposeResult:
        """Compose the content of the box."""

    def compose_problem(self) -> ComposeResult:
        """Compose the line for :meth:`show_problem`; it is hidden at first."""
        yield Static(id="problem", markup=False)

    def show_problem(self, sentence: str) -> None:
        """Show what went wrong."""
        line = self.query_one("#problem", Static)
        line.update(Text(sanitize(sentence, self.glyphs)))
        line.add_class("told")

    def action_close(self) -> None:
        self.dismiss(None)


class Page(Dialog[None]):
    """A box to read."""

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("q,question_mark,i,enter", "close", "page.close", "Close", "Back to the screen"),
    ]

    def __init__(self, title: str, content: RenderableType, glyphs: Glyphs) -> None:
        super().__init__(title, glyphs, page=True)
        self.content = content

    def compose_box(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(self.content, id="text", markup=False)
