"""Both themes: palettes for phases, memory, lines and heat maps. All other code refers to colours by name.

Any two phases, any two parts of memory and any two lines differ by at least 10 (CIE76), for people with deuteranopia and
protanopia too; phases and parts of memory also have different colours in a terminal with sixteen. ``series-*`` are for lines
of any kind, unlike phases and memory. ``heat-*`` goes from near the background colour to far from it (ColorBrewer's YlGnBu,
ordered by lightness). Words are never in these colours, but beside a swatch.
"""

from __future__ import annotations

from dataclasses import replace

from rich.color import Color
from rich.style import Style
from textual.theme import Theme

DARK_NAME, LIGHT_NAME = "zerotop-dark", "zerotop-light"

DARK = Theme(
    name=DARK_NAME,
    dark=True,
    primary="#6fa8dc",
    secondary="#8a94a6",
    accent="#e8eef7",
    foreground="#ccd3de",
    background="#10141a",
    surface="#161b23",
    panel="#1d242e",
    success="#5fbf77",
    warning="#e5c04b",
    error="#ff5c57",
    variables={
        "muted": "#8790a0",
        "rule-line": "#3a4454",
        "free": "#202833",
        "strip": "#161c25",
        "phase-data": "#f1ea6b",
        "phase-forward": "#86d4f6",
        "phase-backward": "#407ee3",
        "phase-step": "#e3871c",
        "phase-transfer": "#c2543c",
        "phase-communication": "#da8cbf",
        "phase-eval": "#40af7d",
        "phase-checkpoint": "#d4d3da",
        "phase-init": "#2d3db1",
        "phase-other": "#5f6679",
        "phase-unknown": "#3d4658",
        "memory-allocated": "#cb80fd",
        "memory-reserved": "#8c41af",
        "memory-other": "#5797b2",
        "memory-parameters": "#e6d3ff",
        "memory-gradients": "#ac7cd8",
        "memory-master": "#ff8e9e",
        "memory-optimizer": "#d01655",
        "memory-buffers": "#5a4a79",
        "memory-activations": "#7e5cef",
        "memory-workspaces": "#a08d40",
        "memory-unexplained": "#f8cc9f",
        "memory-others": "#004486",
        "load": "#57b88a",
        "load-others": "#33715a",
        "cursor-ground": "#39445a",
        "tint-data": "#33352a",
        "tint-forward": "#223440",
        "tint-backward": "#18263c",
        "tint-step": "#33271c",
        "tint-transfer": "#34211f",
        "tint-communication": "#332838",
        "tint-other": "#1c2129",
        "spread": "#4b5a70",
        "series-0": "#fdf1f7",
        "series-1": "#bbff21",
        "series-2": "#a1b0e6",
        "series-3": "#9aa922",
        "series-4": "#d517fb",
        "series-5": "#ac5f76",
        "heat-0": "#102750",
        "heat-1": "#183d77",
        "heat-2": "#1f5c97",
        "heat-3": "#1d7eae",
        "heat-4": "#2a9bb7",
        "heat-5": "#4ab6b7",
        "heat-6": "#80ceb1",
        "heat-7": "#acd5a3",
        "heat-8": "#cbe4a1",
        "heat-9": "#fcffb4",
        "past": "#3d6fb6",
        "block-cursor-background": "#3d6fb6",
        "block-cursor-foreground": "#ffffff",
        "footer-background": "#1d242e",
        "border": "#3a4454",
    },
)

LIGHT = Theme(
    name=LIGHT_NAME,
    dark=False,
    primary="#2a5f9e",
    secondary="#5d6778",
    accent="#10141a",
    foreground="#242b36",
    background="#fbfcfd",
    surface="#f1f3f6",
    panel="#e4e8ee",
    success="#21803f",
    warning="#7e5900",
    error="#c4221c",
    variables={
        "muted": "#58626e",
        "rule-line": "#b9c1cd",
        "free": "#dde2e9",
        "strip": "#eef1f5",
        "phase-data": "#61a321",
        "phase-forward": "#58b7df",
        "phase-backward": "#2257b9",
        "phase-step": "#e46c17",
        "phase-transfer": "#a43b24",
        "phase-communication": "#b4529e",
        "phase-eval": "#00865b",
        "phase-checkpoint": "#475366",
        "phase-init": "#1b1a67",
        "phase-other": "#a8b3bf",
        "phase-unknown": "#868d99",
        "memory-allocated": "#7a2eb8",
        "memory-reserved": "#d48ded",
        "memory-other": "#4278a1",
        "memory-parameters": "#3d2d93",
        "memory-gradients": "#b97aee",
        "memory-master": "#921c55",
        "memory-optimizer": "#e576a7",
        "memory-buffers": "#611c35",
        "memory-activations": "#7962ee",
        "memory-workspaces": "#538b13",
        "memory-unexplained": "#bc8d48",
        "memory-others": "#8ecdf0",
        "load": "#2f9467",
        "load-others": "#8fcbb2",
        "cursor-ground": "#c3cddb",
        "tint-data": "#e3efd9",
        "tint-forward": "#dff1f9",
        "tint-backward": "#d9e3f3",
        "tint-step": "#f9e8da",
        "tint-transfer": "#eddfdb",
        "tint-communication": "#f0e2ed",
        "tint-other": "#eff1f4",
        "spread": "#a9b9cc",
        "series-0": "#1c0c15",
        "series-1": "#ea2a76",
        "series-2": "#338bd0",
        "series-3": "#6a3e11",
        "series-4": "#430dfe",
        "series-5": "#571279",
        "heat-0": "#f3f2c1",
        "heat-1": "#c7e6c8",
        "heat-2": "#b5dca8",
        "heat-3": "#8acdb3",
        "heat-4": "#63c0c0",
        "heat-5": "#3ca4c2",
        "heat-6": "#1b84bd",
        "heat-7": "#0f66ae",
        "heat-8": "#1b458e",
        "heat-9": "#0e2869",
        "past": "#2a5f9e",
        "block-cursor-background": "#2a5f9e",
        "block-cursor-foreground": "#ffffff",
        "footer-background": "#e4e8ee",
        "border": "#b9c1cd",
    },
)

# Colours where a terminal with fewer has none near ours: names of Rich's colour systems -> variables.
# Dark colours become saturated ones of 256, and black or grey of 16, where blue and yellow words are hard to read.
_TINTS = ("tint-data", "tint-forward", "tint-backward", "tint-step", "tint-transfer", "tint-communication", "tint-other")
_FEWER_COLOURS = {
    (DARK_NAME, "256"): {
        "free": "#262626",
        "phase-unknown": "#363636",
        "tint-data": "#3a3a3a",
        "tint-forward": "#303030",
        "tint-backward": "#262626",
        "tint-step": "#444444",
        "tint-transfer": "#3a3a3a",
        "tint-communication": "#303030",
    },
    (DARK_NAME, "standard"): {
        "primary": "#55ffff",
        "free": "#555555",
        "load-others": "#00aa00",
        "memory-buffers": "#00aa00",
        "phase-unknown": "#aa00aa",
        **dict.fromkeys(_TINTS, "#000000"),
    },
    (LIGHT_NAME, "standard"): {
        "primary": "#0000aa",
        "warning": "#aa00aa",
        "free": "#aaaaaa",
        "load-others": "#55ffff",
        "memory-gradients": "#55ff55",
        "memory-reserved": "#ff55ff",
        "phase-unknown": "#ff55ff",
    },
}


def adapt_theme(theme: Theme, color_system: str | None) -> Theme:
    """Return a theme for a terminal with this colour system: ``truecolor``, ``256`` or ``standard``, which are 16."""
    return replace(theme, variables={**theme.variables, **_FEWER_COLOURS.get((theme.name, color_system or ""), {})})


# Names of styles in drawn rows; each is the component class ``drawn--NAME`` in app.tcss.
_STYLE_NAMES = """
    text value sum last-addend muted label axis heading output later stderr match match-here match-mark caret rule grid
    title title-focused title-value title-warn accent good warn alert band band-muted band-value band-warn brand name
    progress progress-rest badge-live badge-past badge-good badge-bad keys key tab tab-key tab-active peak clipped
    skipped load load-others load-free strip memory-allocated memory-reserved memory-other memory-free memory-parameters
    memory-gradients memory-master memory-optimizer memory-buffers memory-workspaces memory-activations
    memory-unexplained memory-others phase-data phase-forward phase-backward phase-step phase-transfer
    phase-communication phase-eval phase-checkpoint phase-init phase-other phase-unknown ground word cursor cursor-ground
    tint-data tint-forward tint-backward tint-step tint-transfer tint-communication tint-other spread
"""
STYLES = (
    *_STYLE_NAMES.split(),
    *(f"series-{number}" for number in range(6)),
    *(f"heat-{level}" for level in range(10)),
)


def choose_readable(ground: Color | None, style: Style) -> Color | None:
    """Return the style's own or its background's colour, whichever has the higher contrast on ``ground``."""
    choices = [color for color in (style.color, style.bgcolor) if color is not None]
    return max(choices, key=lambda color: _compute_contrast(color, ground), default=None) if ground is not None else None


def _compute_contrast(one: Color, other: Color) -> float:
    """Return the contrast of two colours as WCAG 2 defines it: 1 to 21."""
    darker, lighter = sorted((_compute_luminance(one), _compute_luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _compute_luminance(color: Color) -> float:
    values = [channel / 255 for channel in color.get_truecolor()]
    red, green, blue = (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
