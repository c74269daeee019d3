"""Records the first minute with zerotop in a real terminal: first-minute.cast (asciinema) and first-minute.gif.

``python docs/first_minute.py`` takes about a minute, and needs a monospaced font with braille (``--font``).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple, cast

import pyte
from PIL import Image, ImageDraw, ImageFont
from textual.color import Color

from zerotop.ui.drawing.theme import DARK

HERE = Path(__file__).parent
COLUMNS, ROWS = 110, 32
COMMAND = "zerotop demo --recorded"
# (seconds to wait, keys): the recorded fine-tune of an 8 B model on four GPUs, from its first step on.
KEYS = (
    (12.0, "f"),  # to the end of the recording
    (5.0, "3"),
    (5.0, "4"),
    (5.0, "a"),
    (4.0, "y"),  # copies the fix of the worst finding
    (2.5, "\x1b"),
    (1.0, "q"),
)
FONT = "/usr/share/fonts/truetype/dejavu/DejaVuSansMono.ttf"
FONT_SIZE = 13
FOREGROUND, BACKGROUND = "ccd3de", "10141a"
# The request for kitty's keyboard protocol, of which pyte draws the last letter.
KEYBOARD_PROTOCOL = re.compile(rb"\x1b\[[<>=][0-9;]*u")
FRAME_S = 0.2  # the shortest time between two pictures of the GIF


class Output(NamedTuple):
    """What the terminal printed at a time, in seconds from the start."""

    at_s: float
    data: bytes


def record_terminal(command: list[str]) -> list[Output]:
    """Run the command in a terminal of its own, press the keys, and return its output."""
    process, master = pty.fork()
    if process == 0:
        os.environ.update(TERM="xterm-256color", COLORTERM="truecolor", LANG="C.UTF-8")
        os.execvp(command[0], command)
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    begin = time.monotonic()
    outputs: list[Output] = []
    press_at = 0.0
    for wait_s, keys in (*KEYS, (30.0, "")):
        press_at = time.monotonic() + wait_s
        while (rest_s := press_at - time.monotonic()) > 0:
            if not select.select([master], [], [], rest_s)[0]:
                continue
            try:
                data = os.read(master, 1 << 16)
            except OSError:  # the program has ended
                data = b""
            if not data:
                os.waitpid(process, 0)
                return outputs
            outputs.append(Output(time.monotonic() - begin, data))
        os.write(master, keys.encode())
    raise SystemExit(f"{command[0]} did not end")


def type_command(text: str) -> list[Output]:
    """Return a prompt and the command as if somebody typed it."""
    letters = [Output(0.6 + 0.05 * place, letter.encode()) for place, letter in enumerate(text)]
    return [Output(0.0, b"$ "), *letters, Output(letters[-1].at_s + 0.5, b"\r\n")]


def write_cast(outputs: list[Output], path: Path) -> None:
    """Write an asciicast of version 2."""
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "title": "zerotop: the first minute"}
    events = [[round(output.at_s, 3), "o", output.data.decode("utf-8", "replace")] for output in outputs]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (header, *events)))


def write_gif(outputs: list[Output], path: Path, font_path: str) -> None:
    """Draw the terminal's screen each time it has changed, and write the pictures as one animation."""
    fonts = [ImageFont.truetype(name, FONT_SIZE) for name in (font_path, font_path.replace(".ttf", "-Bold.ttf"))]
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    pictures: list[Image.Image] = []
    durations: list[int] = []
    shown_s = 0.0
    for output, following in zip(outputs, [*outputs[1:], Output(outputs[-1].at_s + 3.0, b"")], strict=True):
        stream.feed(KEYBOARD_PROTOCOL.sub(b"", output.data))
        is_last = following.data == b""
        if following.at_s - output.at_s < FRAME_S and output.at_s - shown_s < 1.0 and not is_last:
            continue
        pictures.append(draw_screen(screen, fonts))
        durations.append(round(1000 * (following.at_s - shown_s)))
        shown_s = following.at_s
    palette = Image.new("P", (1, 1))
    palette.putpalette(choose_palette(pictures))
    frames = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True)


def choose_palette(pictures: list[Image.Image]) -> list[int]:
    """Return red, green and blue of 256 colours: the theme's, and those that cover most of the pictures."""
    counts: Counter[tuple[int, int, int]] = Counter()
    for picture in pictures:
        for count, color in picture.getcolors(maxcolors=1 << 24) or ():
            counts[cast("tuple[int, int, int]", color)] += count
    theme = [Color.parse(value).rgb for value in DARK.variables.values()]
    frequent = [color for color, _ in counts.most_common()]
    return [channel for color in list(dict.fromkeys([*theme, *frequent]))[:256] for channel in color]


def draw_screen(screen: pyte.Screen, fonts: list[ImageFont.FreeTypeFont]) -> Image.Image:
    """Return a picture of a terminal's screen."""
    width, height = round(fonts[0].getlength("M")), FONT_SIZE + 4
    picture = Image.new("RGB", (COLUMNS * width, ROWS * height), f"#{BACKGROUND}")
    draw = ImageDraw.Draw(picture)
    for y in range(ROWS):
        for x in range(COLUMNS):
            cell = screen.buffer[y][x]
            fore, back = choose_color(cell.fg, FOREGROUND), choose_color(cell.bg, BACKGROUND)
            if cell.reverse:
                fore, back = back, fore
            left, top = x * width, y * height
            if back != f"#{BACKGROUND}":
                draw.rectangle((left, top, left + width - 1, top + height - 1), fill=back)
            if cell.data.strip() and not draw_block(draw, cell.data, (left, top, width, height), fore):
                draw.text((left, top + 1), cell.data, font=fonts[bool(cell.bold)], fill=fore)
    return picture


def draw_block(draw: ImageDraw.ImageDraw, character: str, place: tuple[int, int, int, int], fill: str) -> bool:
    """Draw a block element or a braille pattern so that neighbours touch; return False for other characters."""
    left, top, width, height = place
    code = ord(character)
    if 0x2581 <= code <= 0x2588:  # lower eighths
        draw.rectangle((left, top + height - round(height * (code - 0x2580) / 8), left + width - 1, top + height - 1), fill)
    elif 0x2589 <= code <= 0x258F:  # left eighths
        draw.rectangle((left, top, left + max(0, round(width * (0x2590 - code) / 8) - 1), top + height - 1), fill)
    elif code == 0x2580:  # upper half
        draw.rectangle((left, top, left + width - 1, top + height // 2 - 1), fill)
    elif 0x2800 <= code <= 0x28FF:
        for bit, (column, row) in enumerate(((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))):
            if code - 0x2800 >> bit & 1:
                x, y = left + 1 + column * (width // 2), top + 1 + row * (height // 4)
                draw.rectangle((x, y, x + 1, y + 1), fill)
    else:
        return False
    return True


def choose_color(name: str, default: str) -> str:
    """Return a colour of pyte as ``#rrggbb``: the program itself only uses true colours."""
    return f"#{name if len(name) == 6 and set(name) <= set('0123456789abcdef') else default}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--font", default=FONT)
    arguments = parser.parse_args()
    typed = type_command(COMMAND)
    started_s = typed[-1].at_s + 0.1
    words = [str(Path(sys.executable).parent / "zerotop"), *COMMAND.split()[1:]]
    recorded = [Output(started_s + at_s, data) for at_s, data in record_terminal(words)]
    write_cast([*typed, *recorded], HERE / "first-minute.cast")
    write_gif([*typed, *recorded], HERE / "first-minute.gif", arguments.font)


if __name__ == "__main__":
    main()
