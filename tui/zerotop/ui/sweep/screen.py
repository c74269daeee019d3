"""The sweep's screen: keys, and a picture that is redrawn while the sweep runs."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import Screen

from zerotop.analysis.text_tables import format_tsv
from zerotop.recording import sweeps
from zerotop.recording.headers import RecordingError
from zerotop.ui.base.bars.footer_keys import bind, in_footer
from zerotop.ui.base.bindings import list_bindings
from zerotop.ui.base.key_row import KeyRow
from zerotop.ui.base.start_interfaces import RecordingOpened
from zerotop.ui.charts import AXIS_WIDTH
from zerotop.ui.dialogs.help_terms import LEFT_OUT_TERM
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row
from zerotop.ui.sweep.drawing import draw_sweep
from zerotop.ui.sweep.model import SweepModel
from zerotop.ui.widgets.scrollable import Scrollable

_REFRESH_S = 0.5

SWEEP_TERMS: tuple[tuple[str, str], ...] = (
    ("point", "One combination of settings: a fresh process, and a recording that enter opens."),
    ("allocated, reserved", "The highest of PyTorch's allocator on the fullest GPU, in all steps."),
    ("NVML", "The highest use of a rank's process as the driver counts it, context included."),
    ("host", "The highest resident memory of a node's ranks together."),
    ("step cores", "Processor time of a node's ranks in the optimizer's step(), in cores."),
    ("it/s, tokens/s", "Over the intervals between steps after the warm-up; tokens of all ranks together."),
    ("knee", "Up to this many tokens in a micro-batch the peak is flat: it is in the optimizer's step, not in activations."),
    ("R2", "Share of the variance that the line explains: 1 is exact."),
    ("fits, too large", "Of `zerotop fit`: the largest value that ran, and the smallest that ran out of memory."),
    ("predicted, full at", "The value that fills a GPU: as estimated before the first run, and from the runs so far."),
    ("dotted lines", "Of `zerotop fit`: the line through the runs, extended to the memory available to PyTorch."),
    LEFT_OUT_TERM,
)


class SweepScreen(Screen[None]):
    """Shows a sweep while it runs and when it has ended."""

    TITLE = "Sweep"
    HELP = (
        "Every combination of settings, each in a process of its own. Enter opens the recording of a point; Esc returns"
        " here. On a chart the mouse shows values, and its wheel zooms."
    )
    TERMS = SWEEP_TERMS
    ALLOW_SELECT = False
    AUTO_FOCUS = "#sweep-sheet"

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("enter", "open", "sweep.open", "Open", "Open the recording of the point", 8),
        bind("f", "follow", "sweep.follow", "Follow", "Keep the cursor on the point that runs", 6),
        *list_bindings("sweep", "move", "move(-1000000)", "move(1000000)", group=in_footer(5, "point", label_index=1)),
    ]

    def __init__(self, model: SweepModel, glyphs: Glyphs) -> None:
        super().__init__(id="sweep")
        self.model = model
        self.sheet = SweepSheet(model, glyphs, id="sweep-sheet")

    def compose(self) -> ComposeResult:
        yield self.sheet

    def on_mount(self) -> None:
        self.set_interval(_REFRESH_S, self.sheet.repaint)

    def action_move(self, rows: int) -> None:
        self.sheet.scroll_rows(rows)

    def action_page(self, pages: int) -> None:
        self.sheet.scroll_rows(pages * max(1, self.sheet.size.height // 3))

    def action_follow(self) -> None:
        self.model.follow()
        self.sheet.repaint()

    def action_open(self) -> None:
        points = self.model.listed_points[self.model.cursor_row :][:1]  # of a search that begins there are none
        try:
            opened = self.model.progress.open_point(points[0].number) if points else None
        except RecordingError as error:
            self.notify(str(error), severity="error")
            return
        if opened is None:
            self.notify("This point has no recording yet.", timeout=3)
        else:
            self.post_message(RecordingOpened(opened))


class SweepSheet(Scrollable, KeyRow, can_focus=True):
    """The whole screen as one picture. On a chart the mouse shows values, and its wheel zooms."""

    wheel_rows = 1

    def __init__(self, model: SweepModel, glyphs: Glyphs, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self._model = model

    def paint(self, width: int, height: int) -> list[Row] | None:
        labels = {"app.leave": "quit"} | ({"sweep.follow": ""} if self._model.is_following else {})
        keys = self.draw_key_row(labels, width)
        return [*draw_sweep(self._model, width, height - 1, self.glyphs), keys]

    def scroll_rows(self, rows: int) -> None:
        """Move the cursor."""
        self._model.move_cursor(rows)
        self.repaint()

    def on_click(self, event: events.Click) -> None:
        row = event.y - self._model.table_top
        if 0 <= row < self._model.visible_rows:
            self._model.move_cursor(self._model.top_row + row - self._model.cursor_row)
            self.repaint()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        self._point_at((event.x, event.y))

    def on_leave(self) -> None:
        self._point_at(None)

    def _point_at(self, cell: tuple[int, int] | None) -> None:
        before, self._model.pointed = self._model.pointed, cell
        if any(one is not None and self._model.find_chart(*one) for one in (before, cell)):
            self.repaint()

    def turn_wheel(self, event: events.MouseEvent, direction: int) -> None:
        """Zoom the charts if the mouse is on one; elsewhere the wheel scrolls."""
        placed = self._model.find_chart(event.x, event.y)
        if placed is None:
            super().turn_wheel(event, direction)
            return
        event.stop()
        share = (event.x - placed.left - AXIS_WIDTH) / max(1, placed.width - AXIS_WIDTH)
        self._model.zoom(-direction, max(0.0, share))
        self.repaint()

    def copy_text(self) -> str:
        """Return all results, with tabs between the columns."""
        table = sweeps.build_table(self._model.sweep)
        return format_tsv([table.columns, *table.rows()])
