"""The base of all dialogs."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, TypeVar

from rich.console import RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import Input, Static

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


class Prompt(Dialog[Result]):
    """A line to type into."""

    def __init__(self, title: str, text: str, glyphs: Glyphs) -> None:
        super().__init__(title, glyphs)
        self._text = text
        self._early: list[Key] = []

    def compose_box(self) -> ComposeResult:
        yield Static(Text(self._text), id="text", markup=False)
        yield Input(id="place", select_on_focus=False)
        yield from self.compose_problem()

    async def on_mount(self) -> None:
        self.query_one(Input).focus()
        for event in self._early:
            await self.type_key(event)

    async def type_key(self, event: Key) -> bool:
        """Type a key that did not reach the input: over SSH, keys that are typed fast arrive at once. True if taken."""
        if event.key != "enter" and not event.is_printable:
            return False
        if not self.query(Input):
            self._early.append(event)
        elif event.key == "enter":
            await self.query_one(Input).action_submit()
        else:
            self.query_one(Input).insert_text_at_cursor(event.character or "")
        return True


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
