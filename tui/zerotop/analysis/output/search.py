"""Searches the job's whole output within a time budget, so that keys are answered during a search.

Lines that repeat those before them, which a screen shows once.
"""

from __future__ import annotations

import re
import time
from array import array
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from zerotop.analysis.output.lines import LinePosition, OutputBuffer, OutputLine

_RANK = re.compile(r"^\s*\[(?:rank|default)\d+\]:\s?")
# As tqdm writes it; where the output is no terminal, each update may be a line.
_PROGRESS = re.compile(r"\d+%\s*[|\[]|\d+/\d+\s*\[[\d:]+<")
_NUMBERS = re.compile(r"[\d?.:,]+")
# Lines of a message, such as a warning with its place and its source line.
_LONGEST_MESSAGE = 4
_BAR = re.compile(r"[|\[][^|\]]*[|\]]")


def fold_repeats(lines: Iterable[OutputLine], search: re.Pattern[str] | None = None) -> list[OutputLine]:
    """Return the last line of each run that says the same, with the number of its lines.

    Lines of several ranks say the same, and so do updates of a progress bar. A message of several lines that comes again
    at once is folded, too. A run ends at the cursor, and each line that a ``search`` finds stays.
    """
    folded: list[OutputLine] = []
    keys: list[Hashable] = []
    for line in lines:
        is_found = search is not None and search.search(line.text) is not None
        folded.append(line)
        keys.append(object() if is_found else (_make_key(line.text), line.is_later, line.position is None))
        for size in range(1, min(_LONGEST_MESSAGE, len(keys) // 2) + 1):
            if keys[-size:] == keys[-2 * size : -size] and any(one.text.strip() for one in folded[-size:]):
                again = zip(folded[-2 * size : -size], folded[-size:], strict=True)
                folded[-2 * size :] = [later._replace(repeats=one.repeats + later.repeats) for one, later in again]
                del keys[-size:]
                break
    return folded


def _make_key(text: str) -> str:
    text = _RANK.sub("", text)
    return _NUMBERS.sub("", _BAR.sub("", text)) if _PROGRESS.search(text) else text


_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")
# With fewer blocks, matches are marked by line instead of by block.
_FEW_BLOCKS = 4


def compile_pattern(text: str) -> re.Pattern[str]:
    """Compile a plain text to search for; ignore case unless the text has capitals."""
    return re.compile(re.escape(text), 0 if text != text.lower() else re.IGNORECASE)


class OutputSearch:
    """Matches of a text in the output: the matching lines of each block.

    A block is split into lines only if its bytes contain the text. Text that only appears because one line overwrites
    another is not found.
    """

    def __init__(self, buffer: OutputBuffer, text: str) -> None:
        self.text = text
        self.pattern = compile_pattern(text)
        self._buffer = buffer
        self._matches: dict[int, Sequence[int]] = {}  # of searched blocks that are final
        self._open_matches: tuple[object, Sequence[int]] = (None, [])
        self._next_block = 0  # all blocks before it are searched
        self._sealed_count = 0  # matches in blocks that are final

    @property
    def match_count(self) -> int:
        """Number of matching lines so far."""
        return self._sealed_count + len(self._find_in_open())

    @property
    def searched_share(self) -> float:
        return (len(self._matches) + 1) / (self._buffer.blocks.sealed_count + 1)

    @property
    def is_done(self) -> bool:
        """Whether all of the output is searched."""
        return len(self._matches) == self._buffer.blocks.sealed_count

    def continue_search(self, budget_s: float) -> bool:
        """Search for about ``budget_s`` seconds; return whether all is searched."""
        until = time.perf_counter() + budget_s
        while not self.is_done and time.perf_counter() < until:
            while self._next_block in self._matches:
                self._next_block += 1
            self._find_in_block(self._next_block)
        return self.is_done

    def find_nearest(
        self, position: LinePosition, direction: int, budget_s: float
    ) -> tuple[LinePosition | None, LinePosition | None]:
        """Return (the next match in a direction, None; or None, the position to continue from when time is up)."""
        until = time.perf_counter() + budget_s
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
            if time.perf_counter() >= until and 0 <= block <= self._buffer.blocks.sealed_count:
                return None, LinePosition(block, line)
        return None, None

    def number_match(self, position: LinePosition) -> int | None:
        """Return the number of the match at a position, from 1; None until everything before it is searched."""
        if any(block not in self._matches for block in range(min(position.block, self._buffer.blocks.sealed_count))):
            return None
        before = sum(len(self._matches[block]) for block in range(position.block))
        lines = self._find_in_block(position.block)
        at = bisect_left(lines, position.line)
        return before + at + 1 if at < len(lines) and lines[at] == position.line else None

    def match_shares(self) -> tuple[float, ...]:
        """Return the positions of matches in the whole output, from 0 to 1: of lines, or with many blocks of blocks."""
        sealed = self._buffer.blocks.sealed_count
        matches = {block: lines for block, lines in self._matches.items() if lines}
        if sealed < _FEW_BLOCKS:
            matches[sealed] = self._find_in_open()
            positions = (LinePosition(block, line) for block, lines in matches.items() for line in lines)
            return tuple(self._buffer.measure_share(position) for position in positions)
        return tuple((block + 0.5) / (sealed + 1) for block in matches)

    def _find_in_block(self, block: int) -> Sequence[int]:
        if block >= self._buffer.blocks.sealed_count:
            return self._find_in_open()
        if block not in self._matches:
            self._matches[block] = self._search_block(block)
            self._sealed_count += len(self._matches[block])
        return self._matches[block]

    def _find_in_open(self) -> Sequence[int]:
        """Return the matching lines of the block that still grows."""
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
        whole = "\n".join(texts)
        begins = [match.start() for match in self.pattern.finditer(whole)]
        if not begins:
            return []
        ends = np.cumsum([len(text) + 1 for text in texts])
        return array("I", np.unique(np.searchsorted(ends, begins, "right")).tolist())
