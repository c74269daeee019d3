"""Searching the job's whole output, a slice of time at a time, so that whoever waits for a key does not wait for this."""

from __future__ import annotations

import re
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from zerotop.analysis.output.lines import LinePosition, OutputBuffer

_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")
# So many blocks are few: it is told where in them something is.
_FEW_BLOCKS = 4


def compile_pattern(text: str) -> re.Pattern[str]:
    """Finds a plain text; capitals and small letters are the same unless it has capitals."""
    return re.compile(re.escape(text), 0 if text != text.lower() else re.IGNORECASE)


class OutputSearch:
    """Where a text is found in a reel: by block the lines that have it.

    A block is made into lines only if its bytes have the text at all. (What reads so only because one line was written over
    another is not found.)
    """

    def __init__(self, buffer: OutputBuffer, text: str, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.text = text
        self.pattern = compile_pattern(text)
        self._buffer = buffer
        self._clock = clock
        self._matches: dict[int, Sequence[int]] = {}  # of blocks that change no more, and were searched
        self._open_matches: tuple[object, Sequence[int]] = (None, [])
        self._next_block = 0  # the blocks before it were all searched
        self._sealed_count = 0  # lines found in blocks that change no more

    @property
    def match_count(self) -> int:
        """How many lines have it, as far as was searched."""
        return self._sealed_count + len(self._find_in_open())

    @property
    def searched_share(self) -> float:
        """Which share of the output was searched."""
        return (len(self._matches) + 1) / (self._buffer.blocks.sealed_count + 1)

    @property
    def is_done(self) -> bool:
        """Whether all of it was."""
        return len(self._matches) == self._buffer.blocks.sealed_count

    def continue_search(self, budget_s: float) -> bool:
        """Searches on for about so long; True when all was searched."""
        until = self._clock() + budget_s
        while not self.is_done and self._clock() < until:
            while self._next_block in self._matches:
                self._next_block += 1
            self._find_in_block(self._next_block)
        return self.is_done

    def find_nearest(
        self, position: LinePosition, direction: int, budget_s: float
    ) -> tuple[LinePosition | None, LinePosition | None]:
        """(the first match after ``place``, or before it; where to go on looking for it when time was up)."""
        until = self._clock() + budget_s
        block, line = position
        while 0 <= block <= self._buffer.blocks.sealed_count:
            lines = self._find_in_block(block)
            if direction > 0:
                at = bisect_left(lines, line)
                if at < len(lines):
                    return LinePosition(block, lines[at]), None
            else:
                at = bisect_left(lines, line) - 1
                if at >= 0:
                    return LinePosition(block, lines[at]), None
            block, line = block + direction, 0 if direction > 0 else 1 << 60
            if self._clock() >= until and 0 <= block <= self._buffer.blocks.sealed_count:
                return None, LinePosition(block, line)
        return None, None

    def number_match(self, position: LinePosition) -> int | None:
        """Which of the matches a place is, counted from 1; None while not all before it was searched."""
        if any(block not in self._matches for block in range(min(position.block, self._buffer.blocks.sealed_count))):
            return None
        before = sum(len(self._matches[block]) for block in range(position.block))
        lines = self._find_in_block(position.block)
        at = bisect_left(lines, position.line)
        return before + at + 1 if at < len(lines) and lines[at] == position.line else None

    def match_shares(self) -> tuple[float, ...]:
        """Where in the whole output there are matches, from 0 to 1; to the block where there are many of those."""
        sealed = self._buffer.blocks.sealed_count
        found = {block: lines for block, lines in self._matches.items() if lines}
        if sealed < _FEW_BLOCKS:
            found[sealed] = self._find_in_open()
            return tuple(
                self._buffer.measure_share(LinePosition(block, line)) for block, lines in found.items() for line in lines
            )
        return tuple((block + 0.5) / (sealed + 1) for block in found)

    def _find_in_block(self, block: int) -> Sequence[int]:
        """The matching lines of a block."""
        if block >= self._buffer.blocks.sealed_count:
            return self._find_in_open()
        if block not in self._matches:
            self._matches[block] = self._search_block(block)
            self._sealed_count += len(self._matches[block])
        return self._matches[block]

    def _find_in_open(self) -> Sequence[int]:
        """The same of the block that grows."""
        texts = self._buffer.blocks.finished_lines(self._buffer.blocks.sealed_count).texts
        if self._open_matches[0] is not texts:
            self._open_matches = (texts, self._match_lines(texts))
        return self._open_matches[1]

    def _search_block(self, block: int) -> Sequence[int]:
        if not any(self._may_match(data) for data in self._buffer.blocks.iter_bytes(block)):
            return []
        return self._match_lines(self._buffer.blocks.finished_lines(block).texts)

    def _may_match(self, data: bytes) -> bool:
        if b"\x1b" in data:
            data = _ESCAPE.sub(b"", data)
        if not self.pattern.flags & re.IGNORECASE:
            return self.text.encode() in data
        if self.text.isascii():
            return self.text.encode() in data.lower()
        return self.pattern.search(data.decode("utf-8", "replace")) is not None

    def _match_lines(self, texts: Sequence[str]) -> Sequence[int]:
        """The numbers of those lines that have it."""
        whole = "\n".join(texts)
        begins = [match.start() for match in self.pattern.finditer(whole)]
        if not begins:
            return []
        ends = np.cumsum([len(text) + 1 for text in texts])
        return array("I", np.unique(np.searchsorted(ends, begins, "right")).tolist())
