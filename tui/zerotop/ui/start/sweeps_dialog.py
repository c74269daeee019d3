"""The sweeps of this machine, each with its answer."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from zerotop.analysis.formatting import format_count
from zerotop.analysis.reports.sweep_verdict import describe_answer
from zerotop.recording.sweeps import Sweep
from zerotop.ui.dialogs.dialog import Dialog
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.text import sanitize


class SweepsDialog(Dialog[Sweep]):
    """Returns the chosen sweep, or None."""

    def __init__(self, listed: Sequence[Sweep], glyphs: Glyphs) -> None:
        super().__init__("Sweeps", glyphs, page=True)
        self.listed = listed

    def compose_box(self) -> ComposeResult:
        texts = ("\n  ".join(sanitize(line, self.glyphs) for line in describe_sweep(sweep)) for sweep in self.listed)
        yield OptionList(*(Option(Text(text)) for text in texts), markup=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self.listed[event.option_index])


def describe_sweep(sweep: Sweep) -> tuple[str, str]:
    """Return ``20250412-093000-tiny  9 of 9 points``, and what it found."""
    answer = describe_answer(sweep) or "no point has a result"
    return f"{sweep.name}  {len(sweep.finished)} of {format_count(len(sweep.points), 'point')}", answer
