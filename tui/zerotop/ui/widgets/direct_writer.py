"""Write changed cells straight to the terminal.

For any change Textual's compositor renders every visible widget and writes a changed row from its widget's left edge on.
That takes a quarter of the cost of a live frame, and makes most of its bytes. The compositor still does so for everything
else, and whenever something may cover a panel or a layout is pending. Both write the same rows, so it does not matter which
of them did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from textual.geometry import Region
from textual.screen import Screen
from textual.widget import Widget

from zerotop.ui.drawing.rows import Row, Span, row_text
from zerotop.ui.drawing.text import cell_width, is_narrow
from zerotop.ui.widgets.textual_private import display_text, get_visible_widgets, is_paintable

Escapes = tuple[str, str]
"""Escape sequences before and after text of some style."""


class DirectWriter:
    """Writes on one screen while nothing covers its own widgets."""

    def __init__(self, screen: Screen[None], allowed_types: type[Widget] | tuple[type[Widget], ...]) -> None:
        """``allowed_types``: types of widgets that do not overlap."""
        self._screen = screen
        self._allowed_types = allowed_types
        self._checked_widgets: object = None
        self._is_uncovered = False
        self._pending_text: list[str] = []

    def can_write(self, widget: Widget, region: Region) -> bool:
        """Return whether the whole widget is visible in this region and nothing covers it."""
        if not is_paintable(self._screen) or self._screen.app.is_inline:
            return False
        visible = get_visible_widgets(self._screen)
        if self._checked_widgets is not visible:
            self._checked_widgets = visible
            self._is_uncovered = all(isinstance(other, self._allowed_types) or other is self._screen for other in visible)
        if not self._is_uncovered or widget not in visible:
            return False
        placed, clip = visible[widget]
        return placed == region and clip.contains_region(region)

    def write(self, region: Region, y: int, pieces: Iterable[tuple[int, str]]) -> None:
        """Buffer pieces (cell, text with escape sequences) of row ``y`` of the region until :meth:`flush_text`."""
        for x, text in pieces:
            self._pending_text.append(f"\x1b[{region.y + y + 1};{region.x + x + 1}H{text}")

    def flush_text(self) -> None:
        """Write everything buffered at once."""
        if self._pending_text:
            text, self._pending_text = "".join(self._pending_text), []
            display_text(self._screen, text)


def iter_changes(before: Row, after: Row) -> Iterator[tuple[int, Sequence[Span]]]:
    """Yield (cell, spans of ``after`` from there on) for each difference between two rows of the same width."""
    measure = len if is_narrow(row_text(before)) and is_narrow(row_text(after)) else cell_width
    piece: list[Span] = []
    begin = x = old_x = index = 0
    for span in after:
        while old_x < x:
            old_x += measure(before[index][0])
            index += 1
        if old_x == x and index < len(before) and before[index] == span:
            if piece:
                yield begin, piece
                piece = []
        else:
            begin = begin if piece else x
            piece.append(span)
        x += measure(span[0])
    if piece:
        yield begin, piece


def apply_escapes(spans: Iterable[Span], get_escapes: Callable[[str], Escapes]) -> str:
    """Return the text of spans with the escape sequences of their styles."""
    parts: list[str] = []
    for text, name in spans:
        begin, end = get_escapes(name)
        parts += (begin, text, end)
    return "".join(parts)
