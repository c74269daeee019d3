"""What changed in a picture, written straight to the terminal.

For any change Textual's compositor renders every widget in sight and writes a changed row from its widget's left edge on:
a quarter of what a live frame cost, and most of its bytes. It stays in charge of all else, and whenever something may lie
over a panel or a layout is under way. What it renders are the same rows, so that it does not matter who wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from textual._compositor import CompositorUpdate
from textual.geometry import Region
from textual.screen import Screen
from textual.widget import Widget

from zerotop.ui.drawing.rows import Row, Span, row_text
from zerotop.ui.drawing.text import cell_width, is_narrow

Escapes = tuple[str, str]
"""What the terminal is told before and after a text of some style."""


class WrittenText(CompositorUpdate):
    """Text with its escapes, as the app's display takes it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def render_segments(self, console: Console) -> str:
        return self._text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._text


class DirectWriter:
    """Writes on one screen, where nothing lies over its own widgets."""

    def __init__(self, screen: Screen[None], allowed_types: type[Widget] | tuple[type[Widget], ...]) -> None:
        """``own``: kinds of widgets that do not overlap."""
        self._screen = screen
        self._allowed_types = allowed_types
        self._checked_widgets: object = None
        self._is_uncovered = False
        self._pending_text: list[str] = []

    def can_write(self, widget: Widget, region: Region) -> bool:
        """Whether that widget is seen, all of it, where it is to be, and nothing is over it."""
        screen, app = self._screen, self._screen.app
        # While the program ends there are no screens, and panels still hear that they lost the focus.
        if app._screen_stack[-1:] != [screen] or app._batch_count or app.is_inline:
            return False
        visible = screen._compositor.visible_widgets
        if self._checked_widgets is not visible:
            self._checked_widgets = visible
            self._is_uncovered = all(isinstance(other, self._allowed_types) or other is screen for other in visible)
        if not self._is_uncovered or widget not in visible:
            return False
        lies, clip = visible[widget]
        return lies == region and clip.contains_region(region)

    def write(self, region: Region, y: int, pieces: Sequence[tuple[int, str]]) -> None:
        """Text with its escapes at cells of a row of the region; on the terminal it is after :meth:`lift`."""
        for x, text in pieces:
            self._pending_text.append(f"\x1b[{region.y + y + 1};{region.x + x + 1}H{text}")

    def flush_text(self) -> None:
        """The picture is whole: now it is written, in one go."""
        if self._pending_text:
            text, self._pending_text = "".join(self._pending_text), []
            self._screen.app._display(self._screen, WrittenText(text))


def iter_changes(before: Row, after: Row) -> Iterator[tuple[int, Sequence[Span]]]:
    """Where two rows of one width differ: (cell, spans of ``after`` from there on)."""
    size = len if is_narrow(row_text(before)) and is_narrow(row_text(after)) else cell_width
    piece: list[Span] = []
    begin = x = old_x = place = 0
    for span in after:
        while old_x < x:
            old_x += size(before[place][0])
            place += 1
        if old_x == x and place < len(before) and before[place] == span:
            if piece:
                yield begin, piece
                piece = []
        else:
            begin = begin if piece else x
            piece.append(span)
        x += size(span[0])
    if piece:
        yield begin, piece


def apply_escapes(spans: Iterable[Span], get_escapes: Callable[[str], Escapes]) -> str:
    """The text of spans with the escapes of their styles."""
    parts: list[str] = []
    for text, name in spans:
        begin, end = get_escapes(name)
        parts += (begin, text, end)
    return "".join(parts)
