"""Interpret a program's output as a terminal does: progress bars overwrite themselves, escape sequences disappear."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

# Control sequences (CSI), operating-system commands (OSC) and two-byte escapes.
_ESCAPE_PATTERN = re.compile(r"\x1b(?:\[([0-?]*)[ -/]*([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")
_TOKEN_PATTERN = re.compile(rf"({_ESCAPE_PATTERN.pattern}|[\r\b\t])")
_PARTIAL_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*\x1b?|[ -/]*)\Z")
_MAX_ESCAPE = 512


class TerminalScreen:
    """The lines of a program's output, which is fed in pieces.

    Carriage return, backspace, tab, cursor up and down and erase-in-line are applied; other escape sequences and control
    characters are dropped. An incomplete character or escape sequence waits for its rest.
    """

    def __init__(self, max_rows: int) -> None:
        """Keep at least ``max_rows`` lines before the last one."""
        self.rows = [""]
        self.finished_ns: list[int] = []  # unix time at which the cursor first left each row but the last
        self._max_rows = max_rows
        self._row = self._column = 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._partial_escape = ""  # the begin of an incomplete escape sequence

    def feed_lines(self, lines: Sequence[bytes], times_ns: Sequence[int]) -> None:
        """Feed bytes split at newlines; ``times_ns`` has the time of the newline after each piece but the last."""
        for line, time_ns in zip(lines, times_ns, strict=False):
            self._write_text(self._partial_escape + self._decode(line, True), whole=True)
            self._finish_row(time_ns)
        self._write_text(self._partial_escape + self._decode(lines[-1]), whole=False)
        if len(self.rows) > 2 * self._max_rows + 1:
            self._drop_rows(len(self.rows) - self._max_rows - 1)

    def _drop_rows(self, count: int) -> None:
        count = min(count, self._row)
        del self.rows[:count], self.finished_ns[:count]
        self._row -= count

    def _finish_row(self, time_ns: int) -> None:
        if self._row + 1 == len(self.rows):
            self.rows.append("")
            self.finished_ns.append(time_ns)
        self._row += 1
        self._column = 0

    def _write_text(self, text: str, *, whole: bool) -> None:
        """Write a text without newlines; ``whole``: it completes its line."""
        self._partial_escape = ""
        segments = text.split("\r")
        if all(segment.isprintable() for segment in segments):
            self._overwrite_row(segments)
            return
        partial = None if whole else _PARTIAL_ESCAPE.search(text, max(0, len(text) - _MAX_ESCAPE))
        if partial:
            text, self._partial_escape = text[: partial.start()], partial.group()
        position = 0
        for match in _TOKEN_PATTERN.finditer(text):
            self._put_text("".join(filter(str.isprintable, text[position : match.start()])))
            position = match.end()
            self._apply_token(match)
        self._put_text("".join(filter(str.isprintable, text[position:])))

    def _overwrite_row(self, segments: list[str]) -> None:
        """Write texts between carriage returns, last first: of a progress bar only the last one is visible."""
        self._put_text(segments[0])
        if len(segments) == 1:
            return
        shown = segments[-1]
        for segment in reversed(segments[1:-1]):
            shown += segment[len(shown) :]
        self.rows[self._row] = shown + self.rows[self._row][len(shown) :]
        self._column = len(segments[-1])

    def _put_text(self, text: str) -> None:
        if text:
            line = self.rows[self._row].ljust(self._column)
            self.rows[self._row] = line[: self._column] + text + line[self._column + len(text) :]
            self._column += len(text)

    def _apply_token(self, match: re.Match[str]) -> None:
        token = match.group(1)
        if token == "\r":
            self._column = 0
        elif token == "\b":
            self._column = max(0, self._column - 1)
        elif token == "\t":
            self._column += 8 - self._column % 8
        else:
            self._apply_sequence(match.group(2) or "", match.group(3))

    def _apply_sequence(self, count: str, final: str | None) -> None:
        amount = min(int(count[:4]), 1000) if count.isdigit() else 1
        if final == "A":
            self._row = max(0, self._row - amount)
        elif final == "B":
            self._row = min(len(self.rows) - 1, self._row + amount)
        elif final == "K":
            line, column = self.rows[self._row], self._column
            self.rows[self._row] = {"1": " " * column + line[column:], "2": ""}.get(count, line[:column])


def strip_escapes(text: str) -> str:
    """Return the text without escape sequences, such as colours and moves of the cursor."""
    return _ESCAPE_PATTERN.sub("", text) if "\x1b" in text else text


def trim_rows(rows: Sequence[str], max_rows: int) -> tuple[str, ...]:
    """Return the last ``max_rows`` rows without blank ones at the end."""
    end = len(rows)
    while end and not rows[end - 1].strip():
        end -= 1
    return tuple(rows[max(0, end - max_rows) : end])
