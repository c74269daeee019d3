"""Widgets that draw rows of styled text and repaint only the cells that changed."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from zerotop.analysis.findings import Finding
from zerotop.ui.base.frame import Frame
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, row_text, row_width
from zerotop.ui.drawing.text import sanitize
from zerotop.ui.drawing.theme import choose_readable
from zerotop.ui.drawing.units import get_units
from zerotop.ui.widgets.direct_writer import DirectWriter, Escapes, apply_escapes, iter_changes
from zerotop.ui.widgets.swatch import find_style

_FULL_BLOCKS = re.compile("█+|[^█]+")


class RowWidget(Widget):
    """A widget that paints rows of spans."""

    ALLOW_SELECT = False

    def __init__(self, glyphs: Glyphs, *, id: str) -> None:
        super().__init__(id=id)
        self.glyphs = glyphs
        self._rows: list[Row] = []
        self._width = 0  # of the rows
        self._strips: list[Strip | None] = []
        self._styles_by_name: dict[str, Style] = {}
        self._style_key: tuple[object, ...] = ()  # theme and background colours that the cached styles belong to
        self._escapes_by_name: dict[str, Escapes] = {}
        self._writer: DirectWriter | None = None
        self._screen_region = Region()

    def set_region(self, region: Region, writer: DirectWriter | None) -> None:
        """Set the widget's place on the terminal, and a writer for it; without one Textual's compositor writes."""
        self._screen_region, self._writer = region, writer

    @abstractmethod
    def paint(self, width: int, height: int) -> list[Row] | None:
        """Return ``height`` rows of exactly ``width`` cells; None while there is nothing to paint."""

    def on_resize(self) -> None:
        self.write_rows()

    def on_focus(self) -> None:
        self.repaint()

    def on_blur(self) -> None:
        self.repaint()

    def repaint(self) -> None:
        """Draw again."""
        self.write_rows()

    def write_rows(self) -> None:
        """Paint, and write the changed cells to the terminal."""
        self.update_rows()
        if self._writer is not None:
            self._writer.flush_text()

    def update_rows(self) -> None:
        """Draw again; the caller flushes the writer after it has updated all its panels."""
        width, height = self.outer_size
        rows = self.paint(width, height) if width and height else None
        if rows is None or rows is self._rows:
            return
        before, self._rows = self._rows, rows
        resized, self._width = width != self._width, width
        if resized or len(before) != len(rows):
            self._strips = [None] * len(rows)
            self.refresh()
            return
        changed = [y for y, (old, new) in enumerate(zip(before, rows, strict=True)) if old != new]
        for y in changed:
            self._strips[y] = None
        if changed and not self._write_changes(before, changed):
            self.refresh(Region.from_union([_find_difference(before[y], rows[y], y, width) for y in changed]))

    def _write_changes(self, before: list[Row], changed: list[int]) -> bool:
        """Write the changed cells of these rows straight to the terminal; return False where the compositor has to."""
        writer, region = self._writer, self._screen_region
        if writer is None or region.size != self.outer_size or not writer.can_write(self, region):
            return False
        for y in changed:
            pieces = iter_changes(before[y], self._rows[y])
            writer.write(
                region,
                y,
                [(x, apply_escapes(_sanitize_spans(spans, self.glyphs), self._find_escapes)) for x, spans in pieces],
            )
        return True

    def plain_text(self) -> str:
        """Return the rows without their colours."""
        return "\n".join(row_text(row).rstrip() for row in self._rows)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the rows unchanged: there is no border, padding or opacity, and checking for them costs time."""
        strips = [self.render_line(y) for y in crop.line_range]
        width = self.size.width
        if any(strip.cell_length != width for strip in strips):  # drawn for the size before a resize
            strips = [strip.adjust_cell_length(width, self.rich_style) for strip in strips]
        for line_filter in self.get_line_filters():
            strips = [strip.apply_filter(line_filter, self.background_colors[1]) for strip in strips]
        begin, end = crop.column_span
        return strips if (begin, end) == (0, width) else [strip.crop(begin, end) for strip in strips]

    def render_line(self, y: int) -> Strip:
        if y >= len(self._rows):
            return Strip.blank(self.size.width, self.rich_style)
        strip = self._strips[y]
        if strip is None:
            spans = _sanitize_spans(self._rows[y], self.glyphs)
            styles = self._styles_by_name
            strip = Strip([Segment(text, styles.get(name) or self._find_style(name)) for text, name in spans], self._width)
            self._strips[y] = strip
        return strip

    def _find_style(self, name: str) -> Style:
        """Return the style of a name in app.tcss; ``a/b`` is the colour of ``a`` on that of ``b``.

        A ``word`` takes the widget's background colour if that is easier to read on ``b``.
        """
        style = self._styles_by_name.get(name)
        if style is None:
            over, _, under = name.partition("/")
            style = find_style(over, self)
            if under:
                ground = find_style(under, self).color
                style += Style(color=choose_readable(ground, style) if over == "word" else None, bgcolor=ground)
            self._styles_by_name[name] = style
        return style

    def _find_escapes(self, name: str) -> Escapes:
        escapes = self._escapes_by_name.get(name)
        if escapes is None:
            strip = Strip([Segment("|", self._find_style(name))])
            for line_filter in self.get_line_filters():
                strip = strip.apply_filter(line_filter, self.background_colors[1])
            begin, _, end = strip.render(self.app.console).partition("|")
            escapes = self._escapes_by_name[name] = begin, end
        return escapes

    def notify_style_update(self) -> None:
        """Drop the cached styles when the theme changed."""
        super().notify_style_update()
        # Textual also calls this whenever a screen is shown; looking up all styles again took half of that time.
        style_key = self.app.theme, self.background_colors
        if style_key == self._style_key:
            return
        self._style_key = style_key
        self._styles_by_name.clear()
        self._escapes_by_name.clear()
        self._strips = [None] * len(self._rows)
        self.refresh()


class RedrawRequested(Message):
    """The shown screen has to be drawn again, after the frame worker has called ``change``.

    ``deliver`` is called in the app's thread with the result of ``change``.
    """

    def __init__(self, change: Callable[[], Any] | None = None, deliver: Callable[[Any], object] | None = None) -> None:
        super().__init__()
        self.change = change
        self.deliver = deliver


class FindingChosen(Message):
    """The mouse chose a finding to go to."""

    def __init__(self, finding: Finding) -> None:
        super().__init__()
        self.finding = finding


class FrameWidget(RowWidget):
    """A widget whose picture is a pure function of the frame, its size and the glyphs.

    The frame worker's thread calls ``draw``, which may read the recording; the app's thread paints the rows.
    """

    frame: Frame | None = None
    """The frame of the painted rows."""
    _cached: tuple[tuple[object, ...] | None, list[Row]] = None, []
    _delivered_rows: list[Row] | None = None

    @abstractmethod
    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        """Return ``height`` rows of exactly ``width`` cells."""

    def cache_key(self, frame: Frame) -> tuple[object, ...] | None:
        """Return everything that the picture depends on besides size, focus and units; None to draw every frame."""
        return None

    def draw_cached(self, frame: Frame, width: int, height: int) -> list[Row]:
        """Draw, or return the last rows if their key is the same."""
        key = self.cache_key(frame)
        if key is not None:
            key = *key, width, height, self.has_focus, get_units()
            if key == self._cached[0]:
                return self._cached[1]
        self._cached = key, self.draw(frame, width, height)
        return self._cached[1]

    def deliver_rows(self, frame: Frame, rows: list[Row] | None) -> None:
        """Set the rows to paint."""
        self.frame, self._delivered_rows = frame, rows

    def paint(self, width: int, height: int) -> list[Row] | None:
        rows = self._delivered_rows
        if rows is None or len(rows) != height or (rows and row_width(rows[0]) != width):
            return None  # drawn for another size: the next rows are on their way
        return rows

    def repaint(self) -> None:
        self.request_redraw()

    def request_redraw(self, change: Callable[[], Any] | None = None) -> None:
        """Have the frame worker call ``change`` and draw the screen again."""
        self.post_message(RedrawRequested(change))


class CommonPanel(FrameWidget):
    """A panel of all screens: drawn from the frame alone, so quickly that the app's thread does it."""

    def paint(self, width: int, height: int) -> list[Row] | None:
        return None if self.frame is None else self.draw_cached(self.frame, width, height)

    def repaint(self) -> None:
        self.write_rows()


def _sanitize_spans(spans: Sequence[Span], glyphs: Glyphs) -> Iterable[Span]:
    """Return the spans as they are painted, without control characters that a recording may contain."""
    if not "".join([text for text, _ in spans]).isprintable():
        spans = [(sanitize(text, glyphs), name) for text, name in spans]
    return convert_blocks(spans) if glyphs.smooth else spans


def convert_blocks(row: Iterable[Span]) -> Iterator[Span]:
    """Yield the row with full blocks as backgrounds: fonts and pictures leave gaps between blocks, not between those."""
    for text, name in row:
        if "█" not in text or name == "output":
            yield text, name
        elif not text.strip("█"):
            yield " " * len(text), _background_style(name)
        else:
            for part in _FULL_BLOCKS.findall(text):
                yield (" " * len(part), _background_style(name)) if part[0] == "█" else (part, name)


@cache
def _background_style(name: str) -> str:
    return f"text/{name.partition('/')[0]}"


def _find_difference(old: Row, new: Row, y: int, width: int) -> Region:
    """Return the cells of row ``y`` from the first to the last span that differs."""
    first = 0
    while first < min(len(old), len(new)) and old[first] == new[first]:
        first += 1
    last = 0
    while last < min(len(old), len(new)) - first and old[-1 - last] == new[-1 - last]:
        last += 1
    begin = row_width(new[:first])
    end = width - row_width(new[len(new) - last :])
    return Region(begin, y, max(1, end - begin), 1)
