"""Searching the job's whole output, a slice of time at a time, so that whoever waits for a key does not wait for this."""

from __future__ import annotations

import re
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from zerotop.analysis.output.lines import Place, Reel

_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")
# So many blocks are few: it is told where in them something is.
_FEW = 4


def pattern(text: str) -> re.Pattern[str]:
    """Finds a plain text; capitals and small letters are the same unless it has capitals."""
    return re.compile(re.escape(text), 0 if text != text.lower() else re.IGNORECASE)


class Search:
    """Where a text is found in a reel: by block the lines that have it.

    A block is made into lines only if its bytes have the text at all. (What reads so only because one line was written over
    another is not found.)
    """

    def __init__(self, reel: Reel, text: str, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.text = text
        self.pattern = pattern(text)
        self._reel = reel
        self._clock = clock
        self._found: dict[int, Sequence[int]] = {}  # of blocks that change no more, and were searched
        self._open: tuple[object, Sequence[int]] = (None, [])
        self._left = 0  # the blocks before it were all searched
        self._sum = 0  # lines found in blocks that change no more

    @property
    def count(self) -> int:
        """How many lines have it, as far as was searched."""
        return self._sum + len(self._of_open())

    @property
    def searched(self) -> float:
        """Which share of the output was searched."""
        return (len(self._found) + 1) / (self._reel.blocks.sealed + 1)

    @property
    def done(self) -> bool:
        """Whether all of it was."""
        return len(self._found) == self._reel.blocks.sealed

    def work(self, budget_s: float) -> bool:
        """Searches on for about so long; True when all was searched."""
        until = self._clock() + budget_s
        while not self.done and self._clock() < until:
            while self._left in self._found:
                self._left += 1
            self._of(self._left)
        return self.done

    def near(self, place: Place, direction: int, budget_s: float) -> tuple[Place | None, Place | None]:
        """(the first match after ``place``, or before it; where to go on looking for it when time was up)."""
        until = self._clock() + budget_s
        block, line = place
        while 0 <= block <= self._reel.blocks.sealed:
            lines = self._of(block)
            if direction > 0:
                at = bisect_left(lines, line)
                if at < len(lines):
                    return Place(block, lines[at]), None
            else:
                at = bisect_left(lines, line) - 1
                if at >= 0:
                    return Place(block, lines[at]), None
            block, line = block + direction, 0 if direction > 0 else 1 << 60
            if self._clock() >= until and 0 <= block <= self._reel.blocks.sealed:
                return None, Place(block, line)
        return None, None

    def number(self, place: Place) -> int | None:
        """Which of the matches a place is, counted from 1; None while not all before it was searched."""
        if any(block not in self._found for block in range(min(place.block, self._reel.blocks.sealed))):
            return None
        before = sum(len(self._found[block]) for block in range(place.block))
        lines = self._of(place.block)
        at = bisect_left(lines, place.line)
        return before + at + 1 if at < len(lines) and lines[at] == place.line else None

    def shares(self) -> tuple[float, ...]:
        """Where in the whole output there are matches, from 0 to 1; to the block where there are many of those."""
        sealed = self._reel.blocks.sealed
        found = {block: lines for block, lines in self._found.items() if lines}
        if sealed < _FEW:
            found[sealed] = self._of_open()
            return tuple(self._reel.share(Place(block, line)) for block, lines in found.items() for line in lines)
        return tuple((block + 0.5) / (sealed + 1) for block in found)

    def _of(self, block: int) -> Sequence[int]:
        """The matching lines of a block."""
        if block >= self._reel.blocks.sealed:
            return self._of_open()
        if block not in self._found:
            self._found[block] = self._look(block)
            self._sum += len(self._found[block])
        return self._found[block]

    def _of_open(self) -> Sequence[int]:
        """The same of the block that grows."""
        texts = self._reel.blocks.finished(self._reel.blocks.sealed).texts
        if self._open[0] is not texts:
            self._open = (texts, self._matching(texts))
        return self._open[1]

    def _look(self, block: int) -> Sequence[int]:
        if not any(self._may_have(data) for data in self._reel.blocks.raw(block)):
            return []
        return self._matching(self._reel.blocks.finished(block).texts)

    def _may_have(self, data: bytes) -> bool:
        if b"\x1b" in data:
            data = _ESCAPE.sub(b"", data)
        if not self.pattern.flags & re.IGNORECASE:
            return self.text.encode() in data
        if self.text.isascii():
            return self.text.encode() in data.lower()
        return self.pattern.search(data.decode("utf-8", "replace")) is not None

    def _matching(self, texts: Sequence[str]) -> Sequence[int]:
        """The numbers of those lines that have it."""
        whole = "\n".join(texts)
        begins = [match.start() for match in self.pattern.finditer(whole)]
        if not begins:
            return []
        ends = np.cumsum([len(text) + 1 for text in texts])
        return array("I", np.unique(np.searchsorted(ends, begins, "right")).tolist())
