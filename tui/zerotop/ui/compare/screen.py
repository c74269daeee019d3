"""The comparison screen: recordings side by side."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import Screen

from zerotop.analysis.reports.measures import Comparison
from zerotop.analysis.text_tables import format_tsv
from zerotop.ui.base.bars.footer_keys import bind, in_footer
from zerotop.ui.base.bindings import list_bindings
from zerotop.ui.base.key_row import KeyRow
from zerotop.ui.compare.drawing import draw_head, draw_rows, format_values
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, fit_row, merge_spans
from zerotop.ui.widgets.scrollable import Scrollable

COMPARE_TERMS: tuple[tuple[str, str], ...] = (
    (
        "bright and muted",
        "Bright rows differ: settings and counts by any amount, measurements by more than 5 %, the usual noise.",
    ),
    ("2.45×", "The ratio to the first recording's value."),
    ("Time", "Medians of all iterations, each on its slowest rank; they add up only approximately."),
)


_MARGIN = 1


def _add_margin(row: Row, style: str) -> Row:
    return merge_spans(((" " * _MARGIN, style), *row, (" " * _MARGIN, style)))


class CompareScreen(Screen[bool]):
    """A table that scrolls. Returns whether to overlay the iterations of the first two recordings."""

    TITLE = "Compare"
    HELP = "Recordings side by side: differences are bright, the rest is muted."
    TERMS = COMPARE_TERMS
    ALLOW_SELECT = False
    AUTO_FOCUS = "#comparison"

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("q,escape", "close", "compare.close", "Back", "Back to the list", 9),
        bind("d", "differing", "compare.differing", "Only differences", "Switch between differences and all rows", 8),
        bind(
            "v", "overlay", "compare.overlay", "Overlay iterations", "Overlay the iterations of the first two recordings", 6
        ),
        *list_bindings(
            "compare", "scroll", "scroll(-100000)", "scroll(100000)", group=in_footer(6, "scroll", label_index=1)
        ),
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


class ComparisonTable(Scrollable, KeyRow, can_focus=True):
    """The table with its heading and keys."""

    def __init__(self, comparison: Comparison, glyphs: Glyphs, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self.comparison = comparison
        self.only_differing = False
        self.top_row = 0

    def paint(self, width: int, height: int) -> list[Row] | None:
        inner = width - 2 * _MARGIN
        rows = draw_rows(self.comparison, inner, self.glyphs, only_differing=self.only_differing)
        room = max(0, height - 2)
        self.top_row = max(0, min(self.top_row, len(rows) - room))
        body = [_add_margin(row, "text") for row in rows[self.top_row : self.top_row + room]]
        blank = [fit_row((), width, self.glyphs)] * (room - len(body))
        keys = self.draw_key_row(self._label_keys(len(rows) > room), width)
        top = _add_margin(draw_head(self.comparison, inner, self.glyphs), "band")
        return [*[top, *body, *blank][: height - 1], keys]

    def _label_keys(self, scrolls: bool) -> dict[str, str]:
        labels = {"compare.differing": "everything"} if self.only_differing else {}
        return labels if scrolls else labels | {"compare.up": ""}

    def scroll_rows(self, number: int) -> None:
        """Scroll down, or up if negative."""
        self.top_row = max(0, self.top_row + number)
        self.repaint()

    def copy_text(self) -> str:
        """Return the shown rows, with tabs between the columns."""
        measures = self.comparison.different_measures if self.only_differing else self.comparison.measures
        lines = [("section", "what", *self.comparison.names)]
        lines += [(measure.section, measure.name.strip(), *format_values(measure)) for measure in measures]
        return format_tsv(lines)
