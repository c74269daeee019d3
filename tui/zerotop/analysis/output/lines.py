"""The job's whole output as a reel of lines around a cursor: printed, being printed, printed later."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from zerotop.session.output_blocks import NONE, Blocks, Lines
from zerotop.session.reader import Session

# Blocks without a finished line (a progress bar has written them) that are passed over in one go.
_MOST_EMPTY = 64


class Place(NamedTuple):
    """A line: the ``line``-th that was finished in a block. It is the same line however much is printed later."""

    block: int
    line: int


BEGIN = Place(0, 0)


class Line(NamedTuple):
    """One line."""

    text: str  # as a terminal would show it
    time_ns: int  # unix time at which it was finished; of one in progress when its last bytes came
    stream: int  # index into STREAMS
    later: bool  # printed after the cursor
    place: Place | None  # None while it is in progress


class Reel:
    """Lines of a session. Places can be moved through it, whatever the cursor; :meth:`look` says where the cursor is."""

    def __init__(self, session: Session) -> None:
        self.blocks = Blocks(session)
        self.cursor = BEGIN
        """The first line that was not yet finished at the cursor: those before it were."""
        self.cursor_ns = 0
        self._unfinished = NONE
        self._counts: tuple[int, ...] = ()

    def look(self, cursor_ns: int) -> None:
        """Takes in what is new, and where the cursor is now."""
        self.blocks.refresh()
        self.cursor_ns, self._counts = cursor_ns, self.blocks.counts(cursor_ns)
        block = self.blocks.at(self._counts)
        self._unfinished = self.blocks.unfinished(block, self._counts)
        self.cursor = Place(block, bisect_right(self._of(block).times_ns.tolist(), cursor_ns))

    def _of(self, block: int) -> Lines:
        return self.blocks.finished(block)

    @property
    def key(self) -> object:
        """Differs when lines do."""
        return self._counts, self.cursor, self.blocks.sealed

    @property
    def unfinished(self) -> int:
        """How many lines were in progress at the cursor: they are told after those that were finished."""
        return len(self._unfinished.texts)

    def moved(self, place: Place, lines: int) -> Place:
        """The place so many lines later (or, negative, earlier), as far as there are any. It may be one past the last."""
        block, line = place.block, place.line + lines
        empty = 0
        while line < 0 and block > 0 and empty < _MOST_EMPTY:
            block -= 1
            count = len(self._of(block).texts)
            line, empty = line + count, 0 if count else empty + 1
        while block < self.blocks.sealed and empty < _MOST_EMPTY and line >= (count := len(self._of(block).texts)):
            line, block, empty = line - count, block + 1, 0 if count else empty + 1
        return Place(block, max(0, min(line, len(self._of(block).texts))))

    def later(self, place: Place) -> Iterator[tuple[Place, Lines]]:
        """The finished lines from a place on: where each is, and the lines of its block."""
        line, empty = place.line, 0
        for block in range(place.block, self.blocks.sealed + 1):
            lines = self._of(block)
            for number in range(line, len(lines.texts)):
                yield Place(block, number), lines
            line, empty = 0, 0 if lines.texts else empty + 1
            if empty > _MOST_EMPTY:
                return

    def lines(self, top: Place, count: int) -> list[Line]:
        """``count`` lines from ``top`` on, those in progress at the cursor among them."""
        shown: list[Line] = []
        told = top > self.cursor
        for place, lines in self.later(top):
            if not told and place >= self.cursor:
                shown, told = [*shown, *self._in_progress()], True
            if len(shown) >= count:
                break
            time_ns, stream = int(lines.times_ns[place.line]), int(lines.streams[place.line])
            shown.append(Line(lines.texts[place.line], time_ns, stream, place >= self.cursor, place))
        return (shown if told else [*shown, *self._in_progress()])[:count]

    def _in_progress(self) -> list[Line]:
        columns = zip(
            self._unfinished.texts, self._unfinished.times_ns.tolist(), self._unfinished.streams.tolist(), strict=True
        )
        return [Line(text, time_ns, stream, False, None) for text, time_ns, stream in columns]

    def time_ns(self, place: Place) -> int | None:
        """When a line was finished."""
        lines = self._of(place.block)
        return int(lines.times_ns[place.line]) if place.line < len(lines.texts) else None

    def share(self, place: Place) -> float:
        """About where in the whole output a place is, from 0 to 1."""
        within = place.line / max(1, len(self._of(place.block).texts))
        return min(1.0, (place.block + within) / (self.blocks.sealed + 1))

    def at_share(self, share: float) -> Place:
        """The place there."""
        position = max(0.0, min(share, 1.0)) * (self.blocks.sealed + 1)
        block = min(int(position), self.blocks.sealed)
        return Place(block, int((position - block) * len(self._of(block).texts)))
