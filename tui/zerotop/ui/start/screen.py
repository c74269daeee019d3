"""The start screen: recordings and running jobs, and actions on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, TypeVar

from textual import events, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Input

from zerotop.analysis.reports.measures import Comparison
from zerotop.analysis.reports.recording_index import ListedRecording
from zerotop.recording.sweeps import Sweep
from zerotop.ui.base.bars.footer_keys import bind
from zerotop.ui.base.bindings import list_bindings
from zerotop.ui.base.start_interfaces import RecordingLibrary, RecordingOpened, RefusedError, RunningJob
from zerotop.ui.compare.screen import CompareScreen
from zerotop.ui.dialogs.yes_no_dialogs import DeleteDialog
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.units import get_units
from zerotop.ui.start.help import START_TERMS
from zerotop.ui.start.model import StartModel
from zerotop.ui.start.panel import StartSheet
from zerotop.ui.start.sweeps_dialog import SweepsDialog
from zerotop.ui.sweep.model import EndedSweep, SweepModel
from zerotop.ui.sweep.screen import SweepScreen

REFRESH_INTERVAL_S = 0.25  # between updates of the list
_AGE_INTERVAL_S = 5.0  # between updates of ages
_NOTICE_S = 8.0  # a notification about a finished task stays this long

Result = TypeVar("Result")


class StartScreen(Screen[None]):
    """Lists recordings and the jobs of this node. The app opens the chosen one."""

    TITLE = "Recordings"
    HELP = "All recordings here, and running jobs. Enter opens one; leaving it returns to this list."
    TERMS = START_TERMS
    ALLOW_SELECT = False
    AUTO_FOCUS = ""

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("enter", "open", "start.open", "Open", "Open the recording or running job", 9),
        bind("space", "mark", "start.mark", "Mark", "Mark the recording for a comparison", 5),
        bind("c", "compare", "start.compare", "Compare", "Compare the marked recordings", 5),
        bind("slash", "filter", "start.filter", "Filter", "Filter the list by words", 8),
        bind("escape", "no_filter", "start.all", "Show all", "Clear the filter, then the marks"),
        bind("o", "order", "start.order", "Order", "Next order: newest, by state, slowest and others", 6),
        bind("e", "export", "start.export", "Export", "Write its steps as a CSV file to the current folder", 3),
        bind("p", "pack", "start.pack", "Pack", "Write it as one small file to the current folder", 3),
        bind("w", "sweeps", "start.sweeps", "Sweeps", "List the sweeps, each with its answer", 3),
        bind("d", "delete", "start.delete", "Delete", "Delete it permanently, after asking", 3),
        *list_bindings("start", "move", "go(0)", "go(-1)"),
    ]

    class Ordered(Message):
        """The user chose another order."""

        def __init__(self, order: str) -> None:
            super().__init__()
            self.order = order

    def __init__(self, library: RecordingLibrary, glyphs: Glyphs, *, order: str = "newest") -> None:
        super().__init__(id="start")
        self.library = library
        self.glyphs = glyphs
        self.model = StartModel(order)
        self._sheet = StartSheet(self.model, library.folder_name, glyphs, id="sheet")
        self._shown_state: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        yield self._sheet
        words = Input(id="filter", placeholder="filter by words", select_on_focus=False)
        words.display = False
        yield words

    def on_mount(self) -> None:
        self.library.start()
        self.refresh_list()
        self.set_interval(REFRESH_INTERVAL_S, self.refresh_list)

    def on_unmount(self) -> None:
        self.library.stop()

    def refresh_list(self) -> None:
        """Update the list from the library, and draw it if it changed."""
        listed = (self.library.recordings, self.library.running_jobs)
        if self._shown_state[:2] != listed:
            self.model.update_items(*listed)
        state = (*listed, int(time.monotonic() / _AGE_INTERVAL_S), get_units())
        if state != self._shown_state:
            self._shown_state = state
            self._sheet.repaint()

    # Moving

    def action_move(self, rows: int) -> None:
        self._sheet.scroll_rows(rows)

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self._sheet.visible_rows - 1))

    def action_go(self, row: int) -> None:
        self.model.go_to_row(row if row >= 0 else len(self.model.rows) - 1)
        self._sheet.repaint()

    def action_mark(self) -> None:
        self.model.toggle_mark()
        self._sheet.repaint()

    def action_order(self) -> None:
        self.model.choose_next_order()
        self.post_message(self.Ordered(self.model.order))
        self._sheet.repaint()

    # The filter

    def on_key(self, event: events.Key) -> None:
        """Keys typed after / belong to the filter, even before it has the focus."""
        words = self.query_one(Input)
        if event.key == "slash":
            event.stop()
            self.action_filter()
        elif self.focused is words and event.is_printable and event.character:
            event.stop()
            words.insert_text_at_cursor(event.character)

    def action_filter(self) -> None:
        words = self.query_one(Input)
        words.display = True
        self.set_focus(words)

    def on_input_changed(self, event: Input.Changed) -> None:
        self.model.set_filter(event.value)
        self._sheet.repaint()

    def on_input_submitted(self) -> None:
        """Close the filter. Without the focus it has got a second Enter, typed at once: the list is meant."""
        if self.focused is None:
            self.action_open()
        else:
            self._close_filter()

    def action_no_filter(self) -> None:
        """Clear the filter, or else the marks."""
        if self.model.filter_text or self.query_one(Input).display:
            self.query_one(Input).value = ""
            self.model.set_filter("")
            self._close_filter()
        else:
            self.model.clear_marks()
        self._sheet.repaint()

    def _close_filter(self) -> None:
        words = self.query_one(Input)
        words.display = bool(words.value)
        self.set_focus(None)
        self._sheet.repaint()

    # Actions on recordings

    def action_open(self) -> None:
        chosen = self.model.chosen_item
        if chosen is not None:
            self._start_task(
                "Opening …", lambda: self.library.open(chosen), lambda opened: self.post_message(RecordingOpened(opened))
            )

    def action_export(self) -> None:
        self._start_recording_task("Exporting …", self.library.export)

    def action_pack(self) -> None:
        self._start_recording_task("Packing …", self.library.pack)

    def action_compare(self) -> None:
        items = self.model.choose_compared()
        if len(items) < 2:
            self.app.notify("Mark two or more with space, then compare them with c.", timeout=4)
        else:
            self._start_task(
                "Comparing …",
                lambda: self.library.compare(items),
                lambda comparison: self._show_comparison(items, comparison),
            )

    def _show_comparison(self, items: Sequence[ListedRecording], comparison: Comparison) -> None:
        def open_overlaid(overlay: bool | None) -> None:
            if overlay:
                chosen = partial(RecordingOpened, beside=items[1].path)
                self._start_task(
                    "Opening …", lambda: self.library.open(items[0]), lambda opened: self.post_message(chosen(opened))
                )

        self.app.push_screen(CompareScreen(comparison, self.glyphs), open_overlaid)

    def action_sweeps(self) -> None:
        self._start_task("Reading the sweeps …", self.library.list_sweeps, self._list_sweeps)

    def _list_sweeps(self, listed: Sequence[Sweep]) -> None:
        def show(chosen: Sweep | None) -> None:
            if chosen is not None:
                progress = EndedSweep(chosen, partial(self.library.open_point, chosen))
                self.app.push_screen(SweepScreen(SweepModel(progress, self.library.find_shape(chosen)), self.glyphs))

        if listed:
            self.app.push_screen(SweepsDialog(listed, self.glyphs), show)
        else:
            self.app.notify("No sweeps yet. zerotop sweep measures many settings, each in a job of its own.", timeout=6)

    def action_delete(self) -> None:
        chosen = self.model.chosen_item
        if not isinstance(chosen, ListedRecording):
            return
        why_not = self.library.describe_obstacle(chosen)
        if why_not:
            self.app.notify(why_not, severity="warning", timeout=_NOTICE_S)
            return

        def delete_confirmed(yes: bool | None) -> None:
            if yes:
                self._start_task("Deleting …", lambda: self.library.delete(chosen), self._notify_done)

        self.app.push_screen(DeleteDialog(chosen, self.glyphs), delete_confirmed)

    def _start_recording_task(self, busy: str, act: Callable[[ListedRecording], str]) -> None:
        chosen = self.model.chosen_item
        if isinstance(chosen, RunningJob):
            self.app.notify("This job is not being recorded; enter starts recording.", timeout=4)
        elif chosen is not None:
            self._start_task(busy, lambda: act(chosen), self._notify_done)

    def _notify_done(self, sentence: str) -> None:
        self.app.notify(sentence, timeout=_NOTICE_S)

    def _start_task(self, busy: str, act: Callable[[], Result], then: Callable[[Result], object]) -> None:
        """Run one task at a time on a thread: reading a long recording takes a while."""
        if not self._sheet.busy_text:
            self._sheet.busy_text = busy
            self._sheet.repaint()
            self._run_task(act, then)

    @work(thread=True)
    def _run_task(self, act: Callable[[], Result], then: Callable[[Result], object]) -> None:
        try:
            result = act()
        except RefusedError as refused:
            sentence = str(refused)
            self.app.call_from_thread(self._finish_task, lambda: self._notify_refused(sentence))
        else:
            self.app.call_from_thread(self._finish_task, lambda: then(result))

    def _finish_task(self, then: Callable[[], object]) -> None:
        self._sheet.busy_text = ""
        self.refresh_list()
        self._sheet.repaint()
        then()

    def _notify_refused(self, sentence: str) -> None:
        self.app.notify(sentence, severity="error", timeout=_NOTICE_S)
