"""The dialog that chooses a recording whose iteration is drawn behind the current one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from zerotop.analysis.reports.recording_index import ListedRecording, Overviews
from zerotop.recording import catalog
from zerotop.recording.headers import RecordingError
from zerotop.ui.base.bars.footer_keys import bind
from zerotop.ui.dialogs.dialog import Dialog
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.text import sanitize
from zerotop.ui.start.drawing import format_headings, format_recording
from zerotop.ui.start.model import build_search_text

_LINE_WIDTH = 88  # cells of a line, if the terminal has room
_EDGE_CELLS = 14  # cells between the terminal's edges and a line, with the scrollbar
_MAX_LINES = 100  # more recordings need the filter


class OverlayDialog(Dialog[Path]):
    """Returns the recording, or None. Lists the user's recordings and those beside ``own_path``, newest first."""

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("down", "move(1)", "beside.down", "Down", "Next recording", priority=True),
        bind("up", "move(-1)", "beside.up", "Up", "Previous recording", priority=True),
    ]

    def __init__(self, own_path: Path, glyphs: Glyphs) -> None:
        super().__init__("Overlay which recording?", glyphs, page=True)
        self.own_path = own_path.absolute()
        self._recordings: list[ListedRecording] = []
        self._is_reading = True
        self._cursor_moved = False  # until then the cursor stays on the newest recording

    def compose_box(self) -> ComposeResult:
        yield Input(id="words", placeholder="filter by words, or enter a path", select_on_focus=False)
        yield Static(Text(format_headings(self._line_width, self.glyphs)), id="heads", markup=False)
        yield OptionList(id="recordings", markup=False)
        yield Static(id="text", markup=False)
        yield from self.compose_problem()

    def on_mount(self) -> None:
        self.query_one(Input).focus()
        self._update_list()
        self._read_recordings()

    @property
    def _line_width(self) -> int:
        return max(20, min(_LINE_WIDTH, self.app.size.width - _EDGE_CELLS))

    @property
    def _is_open(self) -> bool:
        """Whether its parts can be queried; ``is_mounted`` stays true when it closes."""
        return self.is_mounted and self in self.app.screen_stack

    @work(thread=True, exclusive=True)
    def _read_recordings(self) -> None:
        """Read one recording after the other: the newest are listed at once, however many there are."""
        roots = {catalog.find_default_folder().absolute(), self.own_path.parent}
        for overviews in [Overviews(root, None, lambda path: False) for root in roots]:
            overviews.list_recordings()
            while self._is_open and (recording := overviews.read_next()) is not None:
                if _has_iterations(recording) and recording.path.absolute() != self.own_path:
                    self.app.call_from_thread(self._add_recording, recording)
        if self._is_open:
            self.app.call_from_thread(self._finish_reading)

    def _add_recording(self, recording: ListedRecording) -> None:
        self._recordings = sorted([*self._recordings, recording], key=lambda one: one.begin_ns, reverse=True)
        self._update_list()

    def _finish_reading(self) -> None:
        self._is_reading = False
        self._update_list()

    def _update_list(self) -> None:
        """Fill the list again; the cursor stays on its recording."""
        if not self._is_open:
            return
        listed = self.query_one(OptionList)
        chosen = None
        if listed.highlighted is not None and self._cursor_moved:
            chosen = listed.get_option_at_index(listed.highlighted).id
        shown = list(self._filter_recordings())[:_MAX_LINES]
        listed.clear_options()
        width = self._line_width
        listed.add_options([Option(Text(format_recording(each, width, self.glyphs)), id=str(each.path)) for each in shown])
        ids = [str(each.path) for each in shown]
        listed.highlighted = ids.index(chosen) if chosen in ids else 0 if ids else None
        self.query_one("#text", Static).update(Text(self.glyphs.to_plain(self._describe_list(len(shown)))))

    def _filter_recordings(self) -> Iterable[ListedRecording]:
        words = self.query_one(Input).value.lower().split()
        return (each for each in self._recordings if all(word in build_search_text(each) for word in words))

    def _describe_list(self, shown_count: int) -> str:
        if self._is_reading and not shown_count:
            return "Reading recordings …"
        if not self._recordings:
            return "No other recording with finished iterations here. You can enter a path above."
        if not shown_count:
            return f"No matches for “{self.query_one(Input).value}”."
        return "enter draws its last iterations behind the current ones; escape goes back."

    def action_move(self, rows: int) -> None:
        listed = self.query_one(OptionList)
        self._cursor_moved = True
        if listed.option_count:
            place = (listed.highlighted if listed.highlighted is not None else -1) + rows
            listed.highlighted = max(0, min(listed.option_count - 1, place))

    def on_input_changed(self) -> None:
        self._update_list()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        listed = self.query_one(OptionList)
        if listed.highlighted is not None:
            self._choose_recording(listed.get_option_at_index(listed.highlighted).id or "")
        elif event.value.strip():
            self._choose_recording(event.value.strip())

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self._choose_recording(event.option_id or "")

    def _choose_recording(self, text: str) -> None:
        try:
            self.dismiss(catalog.find_recording(str(Path(text).expanduser())))
        except RecordingError as error:
            self.show_problem(sanitize(str(error), self.glyphs))


def _has_iterations(recording: ListedRecording) -> bool:
    return recording.overview is not None and not recording.overview.problem and bool(recording.overview.iterations)
