"""The start screen's picture: the list, more about the chosen one, and the keys."""

from __future__ import annotations

import time
from collections.abc import Sequence

from textual import events
from textual.message import Message

from zerotop.analysis.formatting import plural
from zerotop.analysis.reports.recording_index import Recording
from zerotop.ui.base.footer import Key
from zerotop.ui.base.start_interfaces import Item
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, filled
from zerotop.ui.drawing.units import other_pace, other_sizes
from zerotop.ui.start.columns import Line
from zerotop.ui.start.drawing import DETAIL_ROWS, detail, head, listing
from zerotop.ui.start.model import StartModel
from zerotop.ui.widgets.key_row import Keyed

_LIST_TOP = 2  # rows above the first of the list
_DETAILS_FROM = 16


class Sheet(Keyed):
    """One picture of all of it."""

    class Pointed(Message):
        """A row was clicked; ``twice`` is to open it."""

        def __init__(self, place: int, *, twice: bool) -> None:
            super().__init__()
            self.place = place
            self.twice = twice

    class Scrolled(Message):
        """The wheel was turned, so many rows down."""

        def __init__(self, rows: int) -> None:
            super().__init__()
            self.rows = rows

    def __init__(self, model: StartModel, place: str, glyphs: Glyphs, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self._model = model
        self._place = place
        self.busy = ""
        """What is being done, "" when nothing is."""
        self.seen = 1
        """Rows of the list that there is room for."""

    def paint(self, width: int, height: int) -> list[Row] | None:
        details = DETAIL_ROWS + 1 if height >= _DETAILS_FROM else 0
        room = max(1, height - 2 - details)
        self.seen = max(1, room - 1)
        self._model.scroll(self.seen)
        rows = [head(self._title(), self._place, width, self.glyphs), *self._list(width, room)]
        if details:
            rows.append(filled(((self.glyphs.rule * width, "rule"),), width, self.glyphs))
            rows += detail(self._model.chosen, width, self.glyphs)
        return [*rows[: height - 1], self._last_row(width)]

    def _title(self) -> str:
        model = self._model
        live = f", {model.live} live" if model.live else ""
        found = f", {len(model.rows)} found" if model.filter else ""
        return f"{plural(model.known, 'recording')}{live}{found}"

    def _list(self, width: int, height: int) -> list[Row]:
        model, now_ns = self._model, time.time_ns()
        if not model.rows:
            return nothing(model.filter, width, height, self.glyphs)
        rows: Sequence[Item] = model.rows[model.top : model.top + self.seen]
        lines = [Line(item, at == model.place, model.is_marked(item), now_ns) for at, item in enumerate(rows, model.top)]
        return listing(lines, ((model.order, "title"),), width, height, self.glyphs)

    def _last_row(self, width: int) -> Row:
        if self.busy:
            return filled(((f" {self.glyphs.plain(self.busy)}", "key"),), width, self.glyphs, "keys")
        return self.key_row(keys(self._model), width)

    def on_click(self, event: events.Click) -> None:
        row = event.y - _LIST_TOP
        if 0 <= row < self.seen and row + self._model.top < len(self._model.rows):
            self.post_message(self.Pointed(row + self._model.top, twice=event.chain == 2))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.post_message(self.Scrolled(-1))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.post_message(self.Scrolled(1))


def keys(model: StartModel) -> list[Key]:
    """Those worth naming now."""
    several = len(model.to_compare()) >= 2
    named = [Key("q", "quit", "app.leave", 9)]
    if model.rows:
        named += [Key("enter", "open", "open", 9), Key("space", "mark", "mark", 5)]
        named.append(Key("c", "compare", "compare", 8 if several else 4))
    named += [Key("/", "filter", "filter", 8), Key("o", "order", "order", 6)]
    if isinstance(model.chosen, Recording):
        named += [Key("e", "export", "export", 3), Key("p", "pack", "pack", 3), Key("d", "delete", "delete", 3)]
    named += [Key("u", other_sizes().name, "app.switch_sizes", 1), Key("U", other_pace().value, "app.switch_pace", 0)]
    return [*named, Key("t", "theme", "app.switch_theme", 1), Key("?", "help", "app.help", 7)]


def nothing(filter: str, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    if filter:
        lines = [f"Nothing holds “{filter}”.", "escape shows all again."]
    else:
        lines = [
            "Nothing was recorded yet.",
            "",
            "zerotop run -- COMMAND   starts a job and records it",
            "zerotop attach PID       records one that runs already",
            "zerotop demo             trains a small model, to see what this is like",
            "zerotop demo --recorded  shows a recording of an 8 B model on four GPUs",
        ]
    rows = [filled((), width, glyphs), *(filled(((f"   {glyphs.plain(line)}", "muted"),), width, glyphs) for line in lines)]
    return [*rows, *(filled((), width, glyphs) for _ in range(height - len(rows)))][:height]
