"""Characters to draw with. Which set a terminal gets is decided once, when the program starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PARTS_TEXTURED = {
    "memory-allocated": "█",
    "memory-reserved": "▓",
    "memory-other": "▒",
    "memory-free": "·",
    "memory-parameters": "P",
    "memory-gradients": "G",
    "memory-master": "M",
    "memory-optimizer": "S",
    "memory-buffers": "B",
    "memory-activations": "A",
    "memory-unexplained": "?",
    "memory-others": "o",
    "phase-data": "░",
    "phase-forward": "▒",
    "phase-backward": "▓",
    "phase-step": "█",
    "phase-transfer": "T",
    "phase-communication": "c",
    "phase-eval": "E",
    "phase-checkpoint": "K",
    "phase-init": "i",
    "phase-other": ":",
    "progress": "█",
    "progress-rest": "░",
    "load": "█",
    "load-others": "▒",
    "load-free": "·",
    "series-1": "↓",
    "series-2": "↑",
}
PARTS_ASCII = {
    "memory-allocated": "#",
    "memory-reserved": "=",
    "memory-other": "-",
    "memory-free": ".",
    "memory-parameters": "P",
    "memory-gradients": "G",
    "memory-master": "M",
    "memory-optimizer": "S",
    "memory-buffers": "B",
    "memory-activations": "A",
    "memory-unexplained": "?",
    "memory-others": "o",
    "phase-data": ":",
    "phase-forward": "f",
    "phase-backward": "b",
    "phase-step": "S",
    "phase-transfer": "T",
    "phase-communication": "c",
    "phase-eval": "E",
    "phase-checkpoint": "K",
    "phase-init": "i",
    "phase-other": ".",
    "progress": "#",
    "progress-rest": ".",
    "load": "#",
    "load-others": "+",
    "load-free": ".",
    "series-1": "v",
    "series-2": "^",
}


@dataclass(frozen=True, eq=False)
class Glyphs:
    """A set of characters, each one cell wide (``ellipsis``, ``arrow`` and ``pause`` may be wider)."""

    name: str
    smooth: bool  # cells may be split between two colours; otherwise every part has a character of its own
    parts: Mapping[str, str] = field(default_factory=dict)  # part of a bar -> character, where not smooth
    meter: str = "▇"  # a cell of a bar; not quite full, so that bars under one another stay apart
    eighths: str = " ▁▂▃▄▅▆▇█"  # a cell filled from below, by eighths
    levels: str = " ▁▂▃▄▅▆▇█"  # the same in a strip
    rule: str = "─"
    line: str = "│"
    corner: str = "└"
    tick: str = "┤"
    grid: str = "▔"  # the upper edge of a cell
    peak: str = "▕"
    swatch: str = "■"
    skipped: str = "×"
    clipped: str = "▲"
    marked: str = "▼"  # over a step at which something was found
    mark: str = "◆"  # the same on a line of time
    times: str = "×"
    arrow: str = "→"
    sent: str = "↑"
    received: str = "↓"
    ellipsis: str = "…"
    dot: str = "●"
    play: str = "▶"
    pause: str = "▮▮"
    knob: str = "●"
    closed: str = "▸"  # before what can be opened
    opened: str = "▾"
    track: str = "━"
    rest: str = "─"
    thumb: str = "┃"  # where one is, in a column that stands for a whole
    bullet: str = "·"
    degree: str = "°"
    micro: str = "µ"
    prompt: str = "›"
    minus: str = "−"
    unsafe: str = "\ufffd"

    def find_part(self, name: str) -> str:
        """The character of a whole cell of this part."""
        return self.meter if self.smooth else self.parts.get(name, "#" if self.name == "ascii" else "█")

    def find_sample(self, name: str) -> str:
        """What stands before a part's name: a cell of its colour, or where there are no colours its character."""
        return self.swatch if self.smooth else self.find_part(name)

    def to_plain(self, text: str) -> str:
        """Text of our own, in characters this set allows."""
        return text.translate(_PLAIN) if self.name == "ascii" else text


BLOCKS = Glyphs("blocks", smooth=True)
TEXTURES = Glyphs("textures", smooth=False, parts=PARTS_TEXTURED, peak="│", grid=" ")
ASCII = Glyphs(
    "ascii",
    smooth=False,
    parts=PARTS_ASCII,
    eighths="    #####",
    levels=" .:-=+*##",
    rule="-",
    line="|",
    corner="+",
    tick="+",
    grid=" ",
    peak="|",
    swatch="#",
    skipped="x",
    clipped="^",
    marked="V",
    mark="!",
    times="x",
    arrow="->",
    sent="^",
    received="v",
    ellipsis="..",
    dot="*",
    play=">",
    pause="||",
    knob="O",
    closed="+",
    opened="-",
    track="=",
    rest="-",
    thumb="#",
    bullet=".",
    degree=" ",
    micro="u",
    prompt=">",
    minus="-",
    unsafe="?",
)

_PLAIN = str.maketrans(
    {
        "–": "-",
        "—": "-",
        "−": "-",
        "…": "..",
        "→": "->",
        "←": "<-",
        "↑": "^",
        "↓": "v",
        "×": "x",
        "▼": "V",
        "◆": "!",
        "·": ".",
        "µ": "u",
        "°": " ",
        "’": "'",
        "\u00a0": " ",
        "\u2009": " ",
    }
)


def choose_glyphs(environment: Mapping[str, str], encoding: str | None) -> Glyphs:
    """The characters this terminal can show, from its locale and the encoding of its stream.

    Without any locale set, as in most containers, UTF-8 is assumed, as Python itself does.
    """
    locale = next((environment[key] for key in ("LC_ALL", "LC_CTYPE", "LANG") if environment.get(key)), "utf-8")
    names = (locale, encoding or "utf-8")
    if not all("utf8" in name.lower().replace("-", "") for name in names):
        return ASCII
    return TEXTURES if environment.get("NO_COLOR") else BLOCKS
