"""Asks before a running sweep or search is left."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from zerotop.ui.base.bars.footer_keys import bind
from zerotop.ui.dialogs.dialog import YesNoDialog
from zerotop.ui.drawing.glyphs import Glyphs


class StopDialog(YesNoDialog):
    """Returns whether to stop. The first choice is to continue."""

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("s,y", "choose(True)", "stop.yes", "Stop", "Stop the running point and all others"),
        bind("c,n,q", "choose(False)", "stop.no", "Continue", "Back to the points"),
    ]

    def __init__(self, question: str, glyphs: Glyphs) -> None:
        super().__init__("Stop", glyphs)
        self._question = question

    def compose_box(self) -> ComposeResult:
        yield Static(Text(self._question), id="text", markup=False)
        yield OptionList(Option(Text("c  Continue"), id="go"), Option(Text("s  Stop it"), id="yes"), markup=False)
