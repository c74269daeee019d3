"""Recordings side by side."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from zerotop.analysis.reports.measures import Comparison
from zerotop.analysis.text_tables import format_tsv
from zerotop.ui.base.bindings import list_bindings
from zerotop.ui.base.footer import Key
from zerotop.ui.compare.drawing import draw_head, draw_rows, format_values
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_row, merge_spans
from zerotop.ui.drawing.units import other_sizes
from zerotop.ui.widgets.key_row import KeyRow

COMPARE_TERMS: tuple[tuple[str, str], ...] = (
    (
        "bright and muted",
        "Bright rows differ: settings and counts at all, what was measured by more than 5 %, which runs of one job do.",
    ),
    ("2.45×", "How many times the first recording's value it is."),
    ("Time", "Medians of all iterations, on the slowest rank of each; they add up only roughly."),
)


_MARGIN = 1


def _add_margin(row: Row, style: str) -> Row:
    return merge_spans(((" " * _MARGIN, style), *row, (" " * _MARGIN, style)))


class CompareScreen(Screen[bool]):
    """A table that scrolls. Returns whether to lay the iterations of the first two over one another."""

    TITLE = "Compare"
    HELP = "Recordings side by side: what is the same is muted, what differs is bright."
    TERMS = COMPARE_TERMS
    ALLOW_SELECT = False
    AUTO_FOCUS = "#comparison"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "close", "Back", id="compare.close", tooltip="Back to the list"),
        Binding("v", "overlay", "Overlay", id="compare.overlay", tooltip="Iterations of the first two over one another"),
        Binding("d", "differing", "Differences", id="compare.differing", tooltip="Only what differs, or everything"),
        *list_bindings("compare", "scroll", "scroll(-100000)", "scroll(100000)"),
    ]

    def __init__(self, comparison: Comparison, glyphs: Glyphs) -> None:
        super().__init__(id="compare")
        self.table = ComparisonTable(comparison, glyphs, id="comparison")

    def compose(self) -> ComposeResult:
        yield self.table

    def action_close(self) -> None:
        self.dismiss(False)

    def action_overlay(self) -> None:
        self.dismiss(True)

    def action_differing(self) -> None:
        self.table.only_differing = not self.table.only_differing
        self.table.scroll_rows(-self.table.top_row)

    def action_scroll(self, number: int) -> None:
        self.table.scroll_rows(number)

    def action_page(self, pages: int) -> None:
        self.table.scroll_rows(pages * max(1, self.table.size.height - 4))


class ComparisonTable(KeyRow, can_focus=True):
    """The table, its head and its keys."""

    def __init__(self, comparison: Comparison, glyphs: Glyphs, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self.comparison = comparison
        self.only_differing = False
        self.top_row = 0

    def paint(self, width: int, height: int) -> list[Row] | None:
        inner = width - 2 * _MARGIN
        found = draw_rows(self.comparison, inner, self.glyphs, only_differing=self.only_differing)
        room = max(0, height - 2)
        self.top_row = max(0, min(self.top_row, len(found) - room))
        body = [_add_margin(row, "text") for row in found[self.top_row : self.top_row + room]]
        blank = [fit_row((), width, self.glyphs)] * (room - len(body))
        keys = self.draw_key_row(self._list_keys(len(found) > room), width)
        top = _add_margin(draw_head(self.comparison, inner, self.glyphs), "band")
        return [*[top, *body, *blank][: height - 1], keys]

    def _list_keys(self, scrolls: bool) -> list[Key]:
        scroll = [Key("↑↓", "scroll", "scroll(1)", 6, ("scroll(-1)", "scroll(1)"))] if scrolls else []
        which = Key("d", "everything" if self.only_differing else "only differences", "differing", 8)
        units = Key("u", other_sizes().name, "app.switch_sizes", 3)
        others = [Key("y", "copy", "app.copy", 5), units, Key("?", "help", "app.help", 7)]
        overlay = Key("v", "iterations over one another", "overlay", 6)
        return [Key("q", "back", "close", 9), which, overlay, *scroll, *others]

    def scroll_rows(self, number: int) -> None:
        """Down, or up."""
        self.top_row = max(0, self.top_row + number)
        self.repaint()

    def copy_text(self) -> str:
        """The rows that are shown, tabs between the columns."""
        measures = self.comparison.different_measures if self.only_differing else self.comparison.measures
        lines = [("section", "what", *self.comparison.names)]
        lines += [(measure.section, measure.name.strip(), *format_values(measure)) for measure in measures]
        return format_tsv(lines)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.scroll_rows(-3)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.scroll_rows(3)
