"""The start screen's picture: the list, details of the chosen recording, and the keys."""

from __future__ import annotations

import time
from collections.abc import Sequence

from textual import events

from zerotop.analysis.formatting import format_count
from zerotop.analysis.reports.recording_index import ListedRecording
from zerotop.ui.base.key_row import KeyRow
from zerotop.ui.base.start_interfaces import LibraryItem
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_row
from zerotop.ui.start.columns import ListLine
from zerotop.ui.start.drawing import DETAIL_ROWS, draw_detail, draw_head, draw_list
from zerotop.ui.start.model import StartModel, describe_order
from zerotop.ui.widgets.scrollable import Scrollable

_LIST_TOP = 2  # rows above the first of the list
_MIN_DETAILS_HEIGHT = 16


class StartSheet(Scrollable, KeyRow):
    """The whole screen as one picture."""

    wheel_rows = 1

    def __init__(self, model: StartModel, folder: str, glyphs: Glyphs, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self._model = model
        self._folder = folder
        self.busy_text = ""
        """The task in progress, "" without one."""
        self.visible_rows = 1
        """Rows of the list that fit."""

    def paint(self, width: int, height: int) -> list[Row] | None:
        details = DETAIL_ROWS + 1 if height >= _MIN_DETAILS_HEIGHT else 0
        room = max(1, height - 2 - details)
        self.visible_rows = max(1, room - 1)
        self._model.scroll_to_cursor(self.visible_rows)
        rows = [draw_head(self._format_title(), self._folder, width, self.glyphs), *self._draw_list(width, room)]
        if details:
            rows.append(fit_row(((self.glyphs.rule * width, "rule"),), width, self.glyphs))
            rows += draw_detail(self._model.chosen_item, width, self.glyphs)
        return [*rows[: height - 1], self._draw_last_row(width)]

    def _format_title(self) -> str:
        model = self._model
        live = f", {model.live_count} live" if model.live_count else ""
        matches = f", {len(model.rows)} shown" if model.filter_text else ""
        return f"{format_count(model.recording_count, 'recording')}{live}{matches}"

    def _draw_list(self, width: int, height: int) -> list[Row]:
        model, now_ns = self._model, time.time_ns()
        if not model.rows:
            return draw_empty_list(model.filter_text, width, height, self.glyphs)
        rows: Sequence[LibraryItem] = model.rows[model.top_row : model.top_row + self.visible_rows]
        lines = [
            ListLine(item, at == model.cursor_row, model.is_marked(item), now_ns)
            for at, item in enumerate(rows, model.top_row)
        ]
        return draw_list(lines, ((describe_order(model.order), "title"),), width, height, self.glyphs)

    def _draw_last_row(self, width: int) -> Row:
        if self.busy_text:
            return fit_row(((f" {self.glyphs.to_plain(self.busy_text)}", "key"),), width, self.glyphs, "keys")
        return self.draw_key_row(label_keys(self._model), width)

    def on_click(self, event: events.Click) -> None:
        row = event.y - _LIST_TOP
        if 0 <= row < self.visible_rows and row + self._model.top_row < len(self._model.rows):
            self._model.go_to_row(row + self._model.top_row)
            self.repaint()
            if event.chain == 2:
                self.app.call_later(self.app.run_action, "screen.open")

    def scroll_rows(self, rows: int) -> None:
        """Move the cursor."""
        self._model.move_cursor(rows)
        self.repaint()


def label_keys(model: StartModel) -> dict[str, str]:
    """Return the footer's labels; keys that need a row or a recording are left out without one."""
    recording, rows = ("start.export", "start.pack", "start.delete"), ("start.open", "start.mark", "start.compare")
    hidden = () if isinstance(model.chosen_item, ListedRecording) else recording if model.rows else (*rows, *recording)
    return {"app.leave": "quit", **dict.fromkeys(hidden, "")}


def draw_empty_list(filter: str, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    if filter:
        lines = [f"No matches for “{filter}”.", "Esc clears the filter."]
    else:
        lines = [
            "No recordings yet.",
            "",
            "zerotop run -- COMMAND   starts a job and records it",
            "zerotop attach PID       records a running job",
            "zerotop demo             trains a small model to try zerotop",
            "zerotop demo --recorded  shows a recording of an 8 B model on four GPUs",
        ]
    rows = [
        fit_row((), width, glyphs),
        *(fit_row(((f"   {glyphs.to_plain(line)}", "muted"),), width, glyphs) for line in lines),
    ]
    return [*rows, *(fit_row((), width, glyphs) for _ in range(height - len(rows)))][:height]
