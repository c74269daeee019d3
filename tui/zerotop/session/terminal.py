"""What a terminal would show of a program's output: progress bars overwrite themselves, escapes do not reach the screen."""

from __future__ import annotations

import re

# Control sequences (CSI), operating-system commands (OSC) and two-byte escapes.
_ESCAPE = re.compile(r"\x1b(?:\[([0-?]*)[ -/]*([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")
_TOKEN = re.compile(rf"({_ESCAPE.pattern}|[\r\n\b\t])")


def lines(data: bytes, most: int = 200) -> tuple[str, ...]:
    """The last ``most`` lines. Carriage return, backspace, tab, cursor up and down and erase-in-line are obeyed,
    every other escape and control character is dropped."""
    screen: list[str] = [""]
    row = column = 0
    text = data.decode("utf-8", "replace")
    position = 0
    for match in _TOKEN.finditer(text):
        row, column = _put(screen, row, column, text[position : match.start()])
        position = match.end()
        row, column = _obey(screen, row, column, match)
    _put(screen, row, column, text[position:])
    while screen and not screen[-1]:
        screen.pop()
    return tuple(screen[-most:])


def _put(screen: list[str], row: int, column: int, text: str) -> tuple[int, int]:
    shown = "".join(c for c in text if c.isprintable())
    if shown:
        line = screen[row].ljust(column)
        screen[row] = line[:column] + shown + line[column + len(shown) :]
    return row, column + len(shown)


def _obey(screen: list[str], row: int, column: int, match: re.Match[str]) -> tuple[int, int]:
    token = match.group(1)
    if token == "\r":
        return row, 0
    if token == "\b":
        return row, max(0, column - 1)
    if token == "\t":
        return row, column - column % 8 + 8
    if token == "\n":
        if row + 1 == len(screen):
            screen.append("")
        return row + 1, 0
    count, final = match.group(2) or "", match.group(3)
    amount = min(int(count[:4]), 1000) if count.isdigit() else 1
    if final == "A":
        return max(0, row - amount), column
    if final == "B":
        return min(len(screen) - 1, row + amount), column
    if final == "K":
        screen[row] = {"1": " " * column + screen[row][column:], "2": ""}.get(count, screen[row][:column])
    return row, column
