"""The job's whole output as a reel of lines around a cursor: printed, being printed, printed later."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from zerotop.session.output_blocks import NO_LINES, OutputBlocks, OutputLines
from zerotop.session.reader import Session

# Blocks without a finished line (a progress bar has written them) that are passed over in one go.
_MAX_EMPTY_BLOCKS = 64


class LinePosition(NamedTuple):
    """A line: the ``line``-th that was finished in a block. It is the same line however much is printed later."""

    block: int
    line: int


BEGIN = LinePosition(0, 0)


class OutputLine(NamedTuple):
    """One line."""

    text: str  # as a terminal would show it
    time_ns: int  # unix time at which it was finished; of one in progress when its last bytes came
    stream: int  # index into STREAMS
    is_later: bool  # printed after the cursor
    position: LinePosition | None  # None while it is in progress


class OutputBuffer:
    """Lines of a session. Places can be moved through it, whatever the cursor; :meth:`look` says where the cursor is."""

    def __init__(self, session: Session) -> None:
        self.blocks = OutputBlocks(session)
        self.cursor = BEGIN
        """The first line that was not yet finished at the cursor: those before it were."""
        self.cursor_ns = 0
        self._unfinished = NO_LINES
        self._counts: tuple[int, ...] = ()

    def refresh_at(self, cursor_ns: int) -> None:
        """Takes in what is new, and where the cursor is now."""
        self.blocks.refresh()
        self.cursor_ns, self._counts = cursor_ns, self.blocks.count_records(cursor_ns)
        block = self.blocks.find_block(self._counts)
        self._unfinished = self.blocks.unfinished_lines(block, self._counts)
        self.cursor = LinePosition(block, bisect_right(self._read_block(block).times_ns.tolist(), cursor_ns))

    def _read_block(self, block: int) -> OutputLines:
        return self.blocks.finished_lines(block)

    @property
    def change_key(self) -> object:
        """Differs when lines do."""
        return self._counts, self.cursor, self.blocks.sealed_count

    @property
    def unfinished_count(self) -> int:
        """How many lines were in progress at the cursor: they are told after those that were finished."""
        return len(self._unfinished.texts)

    def move_position(self, position: LinePosition, lines: int) -> LinePosition:
        """The place so many lines later (or, negative, earlier), as far as there are any. It may be one past the last."""
        block, line = position.block, position.line + lines
        empty = 0
        while line < 0 and block > 0 and empty < _MAX_EMPTY_BLOCKS:
            block -= 1
            count = len(self._read_block(block).texts)
            line, empty = line + count, 0 if count else empty + 1
        while (
            block < self.blocks.sealed_count
            and empty < _MAX_EMPTY_BLOCKS
            and line >= (count := len(self._read_block(block).texts))
        ):
            line, block, empty = line - count, block + 1, 0 if count else empty + 1
        return LinePosition(block, max(0, min(line, len(self._read_block(block).texts))))

    def iter_lines(self, position: LinePosition) -> Iterator[tuple[LinePosition, OutputLines]]:
        """The finished lines from a place on: where each is, and the lines of its block."""
        line, empty = position.line, 0
        for block in range(position.block, self.blocks.sealed_count + 1):
            lines = self._read_block(block)
            for number in range(line, len(lines.texts)):
                yield LinePosition(block, number), lines
            line, empty = 0, 0 if lines.texts else empty + 1
            if empty > _MAX_EMPTY_BLOCKS:
                return

    def read_lines(self, top: LinePosition, count: int) -> list[OutputLine]:
        """``count`` lines from ``top`` on, those in progress at the cursor among them."""
        shown: list[OutputLine] = []
        told = top > self.cursor
        for place, lines in self.iter_lines(top):
            if not told and place >= self.cursor:
                shown, told = [*shown, *self._unfinished_lines()], True
            if len(shown) >= count:
                break
            time_ns, stream = int(lines.times_ns[place.line]), int(lines.streams[place.line])
            shown.append(OutputLine(lines.texts[place.line], time_ns, stream, place >= self.cursor, place))
        return (shown if told else [*shown, *self._unfinished_lines()])[:count]

    def _unfinished_lines(self) -> list[OutputLine]:
        columns = zip(
            self._unfinished.texts, self._unfinished.times_ns.tolist(), self._unfinished.streams.tolist(), strict=True
        )
        return [OutputLine(text, time_ns, stream, False, None) for text, time_ns, stream in columns]

    def find_time(self, position: LinePosition) -> int | None:
        """When a line was finished."""
        lines = self._read_block(position.block)
        return int(lines.times_ns[position.line]) if position.line < len(lines.texts) else None

    def measure_share(self, position: LinePosition) -> float:
        """About where in the whole output a place is, from 0 to 1."""
        within = position.line / max(1, len(self._read_block(position.block).texts))
        return min(1.0, (position.block + within) / (self.blocks.sealed_count + 1))

    def position_at_share(self, share: float) -> LinePosition:
        """The place there."""
        position = max(0.0, min(share, 1.0)) * (self.blocks.sealed_count + 1)
        block = min(int(position), self.blocks.sealed_count)
        return LinePosition(block, int((position - block) * len(self._read_block(block).texts)))
