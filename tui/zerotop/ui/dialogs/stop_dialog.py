"""Asks before a running sweep or search is left."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from zerotop.ui.base.bars.footer_keys import bind
from zerotop.ui.dialogs.dialog import Dialog
from zerotop.ui.drawing.glyphs import Glyphs


class StopDialog(Dialog[bool]):
    """Returns whether to stop. The first choice goes on."""

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("s,y", "choose(True)", "stop.yes", "Stop", "Stop the running point and all others"),
        bind("c,n,q", "choose(False)", "stop.no", "Go on", "Back to the points"),
    ]

    def __init__(self, question: str, glyphs: Glyphs) -> None:
        super().__init__("Stop", glyphs)
        self._question = question

    def compose_box(self) -> ComposeResult:
        yield Static(Text(self._question), id="text", markup=False)
        yield OptionList(Option(Text("c  Go on"), id="go"), Option(Text("s  Stop it"), id="stop"), markup=False)

    def on_mount(self) -> None:
        choices = self.query_one(OptionList)
        choices.highlighted = 0
        choices.focus()

    def action_choose(self, yes: bool) -> None:
        self.dismiss(yes)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id == "stop")
