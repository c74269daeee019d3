"""The job's whole output as lines around a cursor: printed, in progress, printed later.

The step in progress when a line was printed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from zerotop.recording.output.blocks import NO_LINES, OutputBlocks, OutputLines
from zerotop.recording.reader import Recording, Source


class StepClock:
    """The step in progress at any time, counted by the lowest rank."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._count = -1
        self._sources: list[Source] = []

    def step_at(self, time_ns: int) -> int | None:
        """Return the step at a time in unix ns; None before the first one and without a probe."""
        begins = self._recording.sources["begins"]
        if len(begins) != self._count:
            self._count = len(begins)
            lowest = min((source.rank for source in begins), default=-1)
            # After a restart the later process counts.
            lowest_sources = (source for source in begins if source.rank == lowest)
            self._sources = sorted(lowest_sources, key=lambda source: source.created_ns, reverse=True)
        for source in self._sources:
            steps = source.until(time_ns)["step"][-1:]
            if len(steps):
                return int(steps[0]) if steps[0] >= 0 else None
        return None


# Most blocks without a finished line (written by a progress bar) that are skipped at once.
_MAX_EMPTY_BLOCKS = 64


class LinePosition(NamedTuple):
    """Position of a line: the ``line``-th finished one in a block. Stays valid when more is printed."""

    block: int
    line: int


BEGIN = LinePosition(0, 0)


class OutputLine(NamedTuple):
    text: str  # as a terminal would show it
    time_ns: int  # unix time at which it was finished; for one in progress, of its last bytes
    stream: int  # index into STREAMS
    is_later: bool  # printed after the cursor
    position: LinePosition | None  # None while it is in progress
    repeats: int = 1  # lines that say the same, of which this is the last


class OutputBuffer:
    """Lines of a recording, readable at any position; :meth:`refresh_at` sets the cursor."""

    def __init__(self, recording: Recording) -> None:
        self.blocks = OutputBlocks(recording)
        self.cursor = BEGIN
        """Position of the first line that was not finished at the cursor."""
        self.cursor_ns = 0
        self._unfinished = NO_LINES

    def refresh_at(self, cursor_ns: int) -> None:
        """Read new output and move the cursor."""
        self.blocks.refresh()
        self.cursor_ns, counts = cursor_ns, self.blocks.count_records(cursor_ns)
        block = self.blocks.find_block(counts)
        self._unfinished = self.blocks.unfinished_lines(block, counts)
        self.cursor = LinePosition(block, bisect_right(self._read_block(block).times_ns.tolist(), cursor_ns))

    def _read_block(self, block: int) -> OutputLines:
        return self.blocks.finished_lines(block)

    @property
    def unfinished_count(self) -> int:
        """Number of lines in progress at the cursor, which come after the finished ones."""
        return len(self._unfinished.texts)

    def move_position(self, position: LinePosition, lines: int) -> LinePosition:
        """Return the position ``lines`` lines later (negative: earlier), at most one past the last line."""
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
        """Yield the finished lines from a position on, as (position, lines of its block)."""
        line, empty = position.line, 0
        for block in range(position.block, self.blocks.sealed_count + 1):
            lines = self._read_block(block)
            for number in range(line, len(lines.texts)):
                yield LinePosition(block, number), lines
            line, empty = 0, 0 if lines.texts else empty + 1
            if empty > _MAX_EMPTY_BLOCKS:
                return

    def read_lines(self, top: LinePosition, count: int) -> list[OutputLine]:
        """Return ``count`` lines from ``top`` on, including those in progress at the cursor."""
        shown: list[OutputLine] = []
        is_past_cursor = top > self.cursor
        for position, lines in self.iter_lines(top):
            is_later, number = position >= self.cursor, position.line
            if not is_past_cursor and is_later:
                shown, is_past_cursor = [*shown, *self._unfinished_lines()], True
            if len(shown) >= count:
                break
            time_ns, stream = int(lines.times_ns[number]), int(lines.streams[number])
            shown.append(OutputLine(lines.texts[number], time_ns, stream, is_later, position))
        return (shown if is_past_cursor else [*shown, *self._unfinished_lines()])[:count]

    def _unfinished_lines(self) -> list[OutputLine]:
        texts, times_ns, streams = self._unfinished.texts, self._unfinished.times_ns, self._unfinished.streams
        columns = zip(texts, times_ns.tolist(), streams.tolist(), strict=True)
        return [OutputLine(*values, False, None) for values in columns]

    def find_time(self, position: LinePosition) -> int | None:
        """Return the unix time at which a line was finished."""
        lines = self._read_block(position.block)
        return int(lines.times_ns[position.line]) if position.line < len(lines.texts) else None

    def measure_share(self, position: LinePosition) -> float:
        """Return roughly how far into the whole output a position is, from 0 to 1."""
        within = position.line / max(1, len(self._read_block(position.block).texts))
        return min(1.0, (position.block + within) / (self.blocks.sealed_count + 1))

    def position_at_share(self, share: float) -> LinePosition:
        """Return the position roughly that far into the output."""
        position = max(0.0, min(share, 1.0)) * (self.blocks.sealed_count + 1)
        block = min(int(position), self.blocks.sealed_count)
        return LinePosition(block, int((position - block) * len(self._read_block(block).texts)))
