"""Asks before a recording is deleted."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from zerotop.analysis.reports.recording_index import ListedRecording
from zerotop.ui.base.bars.footer_keys import bind
from zerotop.ui.dialogs.dialog import YesNoDialog
from zerotop.ui.drawing.formatting import format_size
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.text import sanitize


class DeleteDialog(YesNoDialog):
    """Returns whether to delete. The first choice keeps the recording."""

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("d,y", "choose(True)", "delete.yes", "Delete", "Delete permanently"),
        bind("c,n,q", "choose(False)", "delete.no", "Keep", "Back to the list"),
    ]

    def __init__(self, recording: ListedRecording, glyphs: Glyphs) -> None:
        super().__init__("Delete", glyphs)
        self.recording = recording

    def compose_box(self) -> ComposeResult:
        name, freed = sanitize(self.recording.name, self.glyphs), format_size(self.recording.stamp.bytes)
        yield Static(Text(f"Delete {name} permanently? This frees {freed}."), id="text", markup=False)
        keep, delete = Option(Text("c  Keep it"), id="keep"), Option(Text("d  Delete it"), id="yes")
        yield OptionList(keep, delete, markup=False)
