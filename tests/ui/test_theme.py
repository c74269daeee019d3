"""Colours say the same everywhere, and can be told apart."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from rich.color import Color, ColorSystem
from textual.theme import Theme

from zerotop.ui.theme import DARK, LIGHT, STYLES
from zerotop.ui.widgets.drawn import Drawn

STACKED = ("phase-data", "phase-forward", "phase-backward", "phase-step", "phase-other")
MEMORY = ("memory-allocated", "memory-reserved", "memory-other", "free")


def luminance(color: str) -> float:
    """Relative luminance as WCAG defines it, 0 to 1."""
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
@pytest.mark.parametrize("palette", [STACKED, MEMORY], ids=["phases", "memory"])
def test_palettes_stay_different_in_16_colours(theme: Theme, palette: tuple[str, ...]) -> None:
    shown = [Color.parse(theme.variables[name]).downgrade(ColorSystem.STANDARD).number for name in palette]
    assert len(set(shown)) == len(palette), dict(zip(palette, shown, strict=True))


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
@pytest.mark.parametrize("palette", [STACKED, MEMORY], ids=["phases", "memory"])
def test_neighbours_differ_in_lightness(theme: Theme, palette: tuple[str, ...]) -> None:
    """What lies side by side can be told apart without seeing hues."""
    for one, other in pairwise(palette):
        assert contrast(theme.variables[one], theme.variables[other]) >= 1.25, (one, other)


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
def test_text_can_be_read(theme: Theme) -> None:
    assert theme.background
    assert theme.panel
    assert theme.foreground
    assert theme.error
    assert theme.warning
    assert theme.accent
    for ground in (theme.background, theme.panel):
        assert contrast(theme.foreground, ground) >= 7
        assert contrast(theme.accent, ground) >= 7
        assert contrast(theme.variables["muted"], ground) >= 4
    assert contrast(theme.error, theme.background) >= 4.5
    assert contrast(theme.warning, theme.background) >= 4.5


def test_both_themes_name_the_same_colours() -> None:
    assert DARK.variables.keys() == LIGHT.variables.keys()
    for theme in (DARK, LIGHT):
        phases = [color for name, color in theme.variables.items() if name.startswith("phase-")]
        assert all(one != other for one, other in combinations(phases, 2))


def test_every_style_is_a_component_class() -> None:
    assert {f"drawn--{name}" for name in STYLES} <= Drawn.COMPONENT_CLASSES
