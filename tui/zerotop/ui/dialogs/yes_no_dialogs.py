"""Questions before a recording is deleted, and before a running sweep or search is left."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from zerotop.analysis.reports.recording_index import ListedRecording
from zerotop.ui.base.bars.footer_keys import bind
from zerotop.ui.dialogs.dialog import Dialog
from zerotop.ui.drawing.formatting import format_size
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.text import sanitize


class YesNoDialog(Dialog[bool]):
    """A question with two choices. The first one, no, is highlighted."""

    CHOICES: ClassVar[tuple[str, str]]
    """No and yes, each after its key."""

    def __init__(self, title: str, question: str, glyphs: Glyphs) -> None:
        super().__init__(title, glyphs)
        self._question = question

    def compose_box(self) -> ComposeResult:
        yield Static(Text(self._question), id="text", markup=False)
        no, yes = self.CHOICES
        yield OptionList(Option(Text(no), id="no"), Option(Text(yes), id="yes"), markup=False)

    def on_mount(self) -> None:
        choices = self.query_one(OptionList)
        choices.highlighted = 0
        choices.focus()

    def action_choose(self, yes: bool) -> None:
        self.dismiss(yes)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id == "yes")


class DeleteDialog(YesNoDialog):
    """Returns whether to delete a recording."""

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("d,y", "choose(True)", "delete.yes", "Delete", "Delete permanently"),
        bind("c,n,q", "choose(False)", "delete.no", "Keep", "Back to the list"),
    ]
    CHOICES = ("c  Keep it", "d  Delete it")

    def __init__(self, recording: ListedRecording, glyphs: Glyphs) -> None:
        name, freed = sanitize(recording.name, glyphs), format_size(recording.stamp.bytes)
        super().__init__("Delete", f"Delete {name} permanently? This frees {freed}.", glyphs)


class StopDialog(YesNoDialog):
    """Returns whether to stop a sweep or search."""

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("s,y", "choose(True)", "stop.yes", "Stop", "Stop the running point and all others"),
        bind("c,n,q", "choose(False)", "stop.no", "Continue", "Back to the points"),
    ]
    CHOICES = ("c  Continue", "s  Stop it")

    def __init__(self, question: str, glyphs: Glyphs) -> None:
        super().__init__("Stop", question, glyphs)
