"""Characters to draw with. The program chooses the set for its terminal once, when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Part of a bar -> its character in TEXTURES and in ASCII, which cannot split a cell into two colours.
_PARTS = {
    "memory-allocated": "█#",
    "memory-reserved": "▓=",
    "memory-other": "▒-",
    "memory-free": "·.",
    "memory-parameters": "PP",
    "memory-gradients": "GG",
    "memory-master": "MM",
    "memory-optimizer": "SS",
    "memory-buffers": "BB",
    "memory-workspaces": "WW",
    "memory-activations": "AA",
    "memory-unexplained": "??",
    "memory-others": "oo",
    "phase-data": "░:",
    "phase-forward": "▒f",
    "phase-backward": "▓b",
    "phase-step": "█S",
    "phase-transfer": "TT",
    "phase-communication": "cc",
    "phase-eval": "EE",
    "phase-checkpoint": "KK",
    "phase-init": "ii",
    "phase-other": ":.",
    "phase-unknown": "?.",
    "progress": "█#",
    "progress-rest": "░.",
    "load": "█#",
    "load-others": "▒+",
    "load-free": "·.",
    "series-1": "↓v",
    "series-2": "↑^",
}


@dataclass(frozen=True, eq=False)
class Glyphs:
    """A set of characters, each one cell wide (``ellipsis``, ``arrow`` and ``pause`` may be wider)."""

    name: str
    smooth: bool  # cells may be split between two colours; otherwise each part has its own character
    parts: Mapping[str, str] = field(default_factory=dict)  # part of a bar -> character, if not smooth
    meter: str = "▇"  # a cell of a bar; not quite full, so that bars one above the other do not touch
    eighths: str = " ▁▂▃▄▅▆▇█"  # a cell filled from below, by eighths
    levels: str = " ▁▂▃▄▅▆▇█"  # the same for a strip
    rule: str = "─"
    line: str = "│"
    corner: str = "└"
    tick: str = "┤"
    grid: str = "▔"  # the upper edge of a cell
    peak: str = "▕"
    swatch: str = "■"
    skipped: str = "×"
    gap: str = "╱"  # in a chart where nothing was recorded
    missing: str = "?"  # in place of a step that was not recorded
    clipped: str = "▲"
    marked: str = "▼"  # above a step with a finding
    mark: str = "◆"  # the same on a time line
    earlier: str = "◂"  # points to something further left on a time line
    later: str = "▸"
    times: str = "×"
    arrow: str = "→"
    sent: str = "↑"
    received: str = "↓"
    ellipsis: str = "…"
    dot: str = "●"
    play: str = "▶"
    pause: str = "▮▮"
    knob: str = "●"
    closed: str = "▸"  # before a collapsed item
    opened: str = "▾"
    track: str = "━"
    rest: str = "─"
    thumb: str = "┃"  # the visible part on a scroll bar
    bullet: str = "·"
    degree: str = "°"
    prompt: str = "›"
    minus: str = "−"
    unsafe: str = "\ufffd"

    def find_part(self, name: str) -> str:
        """Return the character of a whole cell of this part."""
        return self.meter if self.smooth else self.parts.get(name, "#" if self.name == "ascii" else "█")

    def find_sample(self, name: str) -> str:
        """Return the character before a part's name in a legend: a swatch, or the part's character without colours."""
        return self.swatch if self.smooth else self.find_part(name)

    def to_plain(self, text: str) -> str:
        """Return text of the program itself in characters of this set."""
        return text.translate(_PLAIN) if self.name == "ascii" else text


BLOCKS = Glyphs("blocks", smooth=True)
TEXTURES = Glyphs("textures", smooth=False, parts={name: pair[0] for name, pair in _PARTS.items()}, peak="│", grid=" ")
ASCII = Glyphs(
    "ascii",
    smooth=False,
    parts={name: pair[1] for name, pair in _PARTS.items()},
    eighths="    #####",
    levels=" .:-=+*##",
    rule="-",
    line="|",
    corner="+",
    tick="+",
    gap="/",
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
    earlier="<",
    later=">",
    closed="+",
    opened="-",
    track="=",
    rest="-",
    thumb="#",
    bullet=".",
    degree=" ",
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
        "≈": "~",
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
    """Return the characters this terminal can show, by its locale and the encoding of its stream.

    Without a locale, as in most containers, assume UTF-8 as Python does.
    """
    locale = next((environment[key] for key in ("LC_ALL", "LC_CTYPE", "LANG") if environment.get(key)), "utf-8")
    names = (locale, encoding or "utf-8")
    if not all("utf8" in name.lower().replace("-", "") for name in names):
        return ASCII
    return TEXTURES if environment.get("NO_COLOR") else BLOCKS
