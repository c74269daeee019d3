"""Choosing another recording, to lay its iteration beside the one that is shown."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from zerotop.analysis.reports.recording_index import Overviews, Recording
from zerotop.session import catalog
from zerotop.session.headers import SessionError
from zerotop.ui.dialogs.dialog import Dialog
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.text import literal
from zerotop.ui.start.drawing import names, one_line
from zerotop.ui.start.model import searched

_WIDTH = 88  # of a line, where the terminal has room
_EDGES = 14  # cells between the edges of the terminal and a line, with the scrollbar
_SHOWN = 100  # lines; who has more recordings filters


class BesideDialog(Dialog[Path]):
    """Returns the recording, or None. Lists the user's and those beside ``own``, newest first, as they are read."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "move(1)", "Down", id="beside.down", tooltip="The next recording", show=False, priority=True),
        Binding("up", "move(-1)", "Up", id="beside.up", tooltip="The recording before", show=False, priority=True),
    ]

    def __init__(self, own: Path, glyphs: Glyphs) -> None:
        super().__init__("Beside which recording?", glyphs, page=True)
        self.own = own.absolute()
        self._known: list[Recording] = []
        self._reading = True
        self._moved = False  # until then the cursor is on the newest, whichever that is

    def contents(self) -> ComposeResult:
        yield Input(id="words", placeholder="words that it must hold, or a path", select_on_focus=False)
        yield Static(Text(names(self._width, self.glyphs)), id="heads", markup=False)
        yield OptionList(id="recordings", markup=False)
        yield Static(id="text", markup=False)
        yield from self.problem()

    def on_mount(self) -> None:
        self.query_one(Input).focus()
        self._show()
        self._read()

    @property
    def _width(self) -> int:
        return max(20, min(_WIDTH, self.app.size.width - _EDGES))

    @work(thread=True, exclusive=True)
    def _read(self) -> None:
        """Looks into one after the other: the newest are there at once, however many there are."""
        roots = {catalog.usual_place().absolute(), self.own.parent}
        for overviews in [Overviews(root, None, lambda path: False) for root in roots]:
            overviews.look()
            while self.is_mounted and (found := overviews.read_next()) is not None:
                if _has_iterations(found) and found.path.absolute() != self.own:
                    self.app.call_from_thread(self._add, found)
        if self.is_mounted:
            self.app.call_from_thread(self._end)

    def _add(self, found: Recording) -> None:
        self._known = sorted([*self._known, found], key=lambda each: each.begin_ns, reverse=True)
        self._show()

    def _end(self) -> None:
        self._reading = False
        self._show()

    def _show(self) -> None:
        """The list again; the cursor stays on its recording."""
        if not self.is_mounted:
            return
        listed = self.query_one(OptionList)
        chosen = None
        if listed.highlighted is not None and self._moved:
            chosen = listed.get_option_at_index(listed.highlighted).id
        shown = list(self._fitting())[:_SHOWN]
        listed.clear_options()
        width = self._width
        listed.add_options([Option(Text(one_line(each, width, self.glyphs)), id=str(each.path)) for each in shown])
        ids = [str(each.path) for each in shown]
        listed.highlighted = ids.index(chosen) if chosen in ids else 0 if ids else None
        self.query_one("#text", Static).update(Text(self.glyphs.plain(self._sentence(len(shown)))))

    def _fitting(self) -> Iterable[Recording]:
        words = self.query_one(Input).value.lower().split()
        return (each for each in self._known if all(word in searched(each) for word in words))

    def _sentence(self, shown: int) -> str:
        if self._reading and not shown:
            return "Reading recordings …"
        if not self._known:
            return "There is no other recording with finished iterations here. A path can be typed above."
        if not shown:
            return f"None of {len(self._known)} holds these words."
        return "enter lays its last iterations behind the present ones; escape goes back."

    def action_move(self, rows: int) -> None:
        listed = self.query_one(OptionList)
        self._moved = True
        if listed.option_count:
            place = (listed.highlighted if listed.highlighted is not None else -1) + rows
            listed.highlighted = max(0, min(listed.option_count - 1, place))

    def on_input_changed(self) -> None:
        self._show()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        listed = self.query_one(OptionList)
        if listed.highlighted is not None:
            self._choose(listed.get_option_at_index(listed.highlighted).id or "")
        elif event.value.strip():
            self._choose(event.value.strip())

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self._choose(event.option_id or "")

    def _choose(self, text: str) -> None:
        try:
            self.dismiss(catalog.find(str(Path(text).expanduser())))
        except SessionError as error:
            self.tell(literal(str(error), self.glyphs))


def _has_iterations(found: Recording) -> bool:
    return found.about is not None and not found.about.problem and bool(found.about.iterations)
