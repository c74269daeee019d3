"""Colours say the same everywhere, and can be told apart."""

from __future__ import annotations

import math
import re
from importlib.resources import files
from itertools import combinations, pairwise

import pytest
from rich.color import Color, ColorSystem
from textual.dom import DOMNode
from textual.theme import Theme

from played_source import PlayedSource
from screens import read_rows
from waiting import wait_until
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.base.frame_widget import FrameWidget
from zerotop.ui.base.tabs import TABS
from zerotop.ui.drawing.theme import DARK, LIGHT, STYLES, adapt_theme
from zerotop.ui.widgets.swatch import find_style

STACKED = ("phase-data", "phase-forward", "phase-backward", "phase-step", "phase-other")
SERIES = tuple(f"series-{number}" for number in range(6))
HEAT = tuple(f"heat-{level}" for level in range(10))
MEMORY = ("memory-allocated", "memory-reserved", "memory-other", "free")
PHASES = tuple(name for name in DARK.variables if name.startswith("phase-"))
PARTS = (*(name for name in DARK.variables if name.startswith("memory-")), "free")
LOADS = ("load", "load-others", "free")


def compute_luminance(color: str) -> float:
    """Relative luminance as WCAG defines it, 0 to 1."""
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def compute_contrast(one: str, other: str) -> float:
    lighter, darker = sorted((compute_luminance(one), compute_luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
@pytest.mark.parametrize("palette", [PHASES, PARTS, LOADS, SERIES], ids=["phases", "memory", "cores", "series"])
def test_palettes_stay_different_in_16_colours(theme: Theme, palette: tuple[str, ...]) -> None:
    variables = adapt_theme(theme, "standard").variables
    shown = [Color.parse(variables[name]).downgrade(ColorSystem.STANDARD).number for name in palette]
    assert len(set(shown)) == len(palette), dict(zip(palette, shown, strict=True))


@pytest.mark.parametrize("system", [ColorSystem.EIGHT_BIT, ColorSystem.STANDARD])
@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
def test_phases_and_meters_are_seen_where_there_are_fewer_colours(theme: Theme, system: ColorSystem) -> None:
    variables = adapt_theme(theme, {ColorSystem.EIGHT_BIT: "256", ColorSystem.STANDARD: "standard"}[system]).variables
    ground = Color.parse(theme.background or "").downgrade(system).get_truecolor()
    for part in (*PHASES, *PARTS, *LOADS):  # the free part of a meter shows its whole length
        assert Color.parse(variables[part]).downgrade(system).get_truecolor() != ground, part


def test_grounds_of_phases_stay_grey_in_256_colours() -> None:
    for name, colour in adapt_theme(DARK, "256").variables.items():
        if name.startswith("tint-") or name == "free":
            shown = Color.parse(colour).downgrade(ColorSystem.EIGHT_BIT).get_truecolor()
            assert max(shown) - min(shown) < 20, name


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
@pytest.mark.parametrize("palette", [PHASES, PARTS, LOADS, SERIES], ids=["phases", "memory", "cores", "series"])
def test_any_two_colours_of_a_palette_differ(theme: Theme, palette: tuple[str, ...]) -> None:
    for one, other in combinations(palette, 2):
        check_difference(theme, one, other)


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
def test_neighbours_on_a_heat_map_differ(theme: Theme) -> None:
    for one, other in pairwise(HEAT):
        check_difference(theme, one, other)


def check_difference(theme: Theme, one: str, other: str) -> None:
    """Check that two colours differ by 10 (CIE76), for the colour-blind too."""
    for eyes in (None, PROTANOPE, DEUTERANOPE):
        difference = math.dist(*(convert_to_lab(theme.variables[name], eyes) for name in (one, other)))
        assert difference >= 10, (one, other, difference, eyes)


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
@pytest.mark.parametrize("palette", [STACKED, MEMORY], ids=["phases", "memory"])
def test_neighbours_differ_in_lightness(theme: Theme, palette: tuple[str, ...]) -> None:
    """What lies side by side can be told apart without seeing hues."""
    for one, other in pairwise(palette):
        assert compute_contrast(theme.variables[one], theme.variables[other]) >= 1.25, (one, other)


# How the eyes of the two most frequent kinds of colour-blind see linear red, green and blue (Machado et al., 2009).
PROTANOPE = (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)
DEUTERANOPE = (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
def test_init_looks_like_no_other_phase(theme: Theme) -> None:
    """Not in 16 colours, and not to the colour-blind."""
    init = theme.variables["phase-init"]
    for name, color in theme.variables.items():
        if name.startswith("phase-") and name != "phase-init":
            shown = [Color.parse(each).downgrade(ColorSystem.STANDARD).number for each in (init, color)]
            assert shown[0] != shown[1], name
            for eyes in (None, PROTANOPE, DEUTERANOPE):
                assert math.dist(lightness_and_hue(init, eyes), lightness_and_hue(color, eyes)) > 0.12, name
    assert compute_contrast(init, theme.variables["phase-other"]) >= 1.5


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
def test_bars_of_phases_stand_out(theme: Theme) -> None:
    """Those of steps that were only counted, too."""
    for phase in PHASES:
        assert compute_contrast(theme.variables[phase], theme.background or "") >= 1.9, phase


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
def test_text_can_be_read(theme: Theme) -> None:
    assert theme.background
    assert theme.panel
    assert theme.foreground
    assert theme.error
    assert theme.warning
    assert theme.accent
    for ground in (theme.background, theme.panel):
        assert compute_contrast(theme.foreground, ground) >= 7
        assert compute_contrast(theme.accent, ground) >= 7
        assert compute_contrast(theme.variables["muted"], ground) >= 4.5
    assert compute_contrast(theme.error, theme.background) >= 4.5
    assert compute_contrast(theme.warning, theme.background) >= 4.5


def simulate_eyes(color: str, eyes: tuple[tuple[float, ...], ...] | None) -> list[float]:
    """Linear red, green and blue of a colour, 0 to 1, as these eyes see it."""
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    seen = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    if eyes is None:
        return seen
    return [min(1.0, max(0.0, sum(share * value for share, value in zip(row, seen, strict=True)))) for row in eyes]


def convert_to_lab(color: str, eyes: tuple[tuple[float, ...], ...] | None) -> tuple[float, float, float]:
    """A colour in CIELAB (D65), in which CIE76 measures distances, to these eyes."""
    red, green, blue = simulate_eyes(color, eyes)
    x, y, z = (
        value / white
        for value, white in (
            (0.4124564 * red + 0.3575761 * green + 0.1804375 * blue, 0.95047),
            (0.2126729 * red + 0.7151522 * green + 0.0721750 * blue, 1.0),
            (0.0193339 * red + 0.1191920 * green + 0.9503041 * blue, 1.08883),
        )
    )
    x, y, z = (value ** (1 / 3) if value > 216 / 24389 else (24389 / 27 * value + 16) / 116 for value in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def lightness_and_hue(color: str, eyes: tuple[tuple[float, ...], ...] | None = None) -> tuple[float, float, float]:
    """A colour in Oklab, in which equal distances look equally far (Ottosson, 2020), to these eyes."""
    red, green, blue = simulate_eyes(color, eyes)
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    middle = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
def test_lines_look_like_no_phase_no_memory_and_no_other_line(theme: Theme) -> None:
    for name in SERIES:
        color = theme.variables[name]
        for other, that in theme.variables.items():
            if other != name and (other.startswith(("phase-", "memory-", "series-")) or other == "load"):
                far = 0.15 if other in SERIES else 0.07
                assert math.dist(lightness_and_hue(color), lightness_and_hue(that)) > far, (name, other)
        assert theme.background is not None
        assert compute_contrast(color, theme.background) >= 3.5


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
def test_heat_can_be_read_by_lightness_alone(theme: Theme) -> None:
    """From what is near the background to what is far from it, in 16 colours too."""
    assert theme.background is not None
    far = [compute_contrast(theme.variables[name], theme.background) for name in HEAT]
    assert all(after / before > 1.1 for before, after in pairwise(far))
    assert far[0] >= 1.1
    assert far[-1] >= 12
    shown = [Color.parse(theme.variables[name]).downgrade(ColorSystem.STANDARD).number for name in HEAT]
    assert len([1 for before, after in pairwise(shown) if before != after]) == len(set(shown)) - 1 >= 3


def test_both_themes_name_the_same_colours() -> None:
    assert DARK.variables.keys() == LIGHT.variables.keys()
    for theme in (DARK, LIGHT):
        phases = [color for name, color in theme.variables.items() if name.startswith("phase-")]
        assert all(one != other for one, other in combinations(phases, 2))


def test_every_style_has_a_rule() -> None:
    rules = (files("zerotop.ui.app") / "app.tcss").read_text()
    assert {f"drawn--{name}" for name in STYLES} == set(re.findall(r"> \.(drawn--[\w-]+) \{", rules))


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
async def test_styles_are_those_of_textual(theme: Theme) -> None:
    """Textual's own way: a node with the class, in the widget."""
    app = ZerotopApp(PlayedSource("story", lambda: 65.0), title="styles", clock=lambda: 1000.0)
    async with app.run_test(size=(120, 40)) as pilot:
        app.theme = theme.name
        await pilot.pause()
        panels = list(app.screen.query(FrameWidget))
        assert len(panels) > 3
        for panel in panels:
            for name in STYLES:
                node = DOMNode(classes=f"drawn--{name}")
                node._attach(panel)
                app.stylesheet.apply(node)
                assert find_style(name, panel) == node.rich_style


WORD = re.compile(r"[A-Za-z0-9]{2,}")


@pytest.mark.parametrize("key", ["", "a", "question_mark"], ids=["screen", "findings", "help"])
@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
async def test_every_word_can_be_read(story_source: RecordingSource, theme: Theme, key: str) -> None:
    """Words on all screens have a contrast of at least 4.5 to what is behind them."""
    app = ZerotopApp(story_source, title="story", clock=lambda: 1000.0)
    checked = 0
    async with app.run_test(size=(160, 45)) as pilot:
        await wait_until(pilot, lambda: len(story_source.findings_at(None)) > 0)
        app.theme = theme.name
        for tab in TABS:
            app.action_switch(tab.name)
            app.viewer.go_to_step(12)
            app.draw_frame()
            await wait_until(pilot, lambda: has_drawn(app))
            if key:
                await pilot.press(key)
                await wait_until(pilot, lambda: app.screen.is_modal)
            place = app.screen.query_one("#box").region if key else app.screen.region
            for strip in app.screen._compositor.render_strips()[place.y : place.bottom]:
                for text, style, _ in strip.crop(place.x, place.right):
                    if WORD.search(text):
                        assert style is not None
                        assert style.color is not None
                        assert style.bgcolor is not None
                        colors = [color.get_truecolor().hex for color in (style.color, style.bgcolor)]
                        assert compute_contrast(*colors) >= 4.5, (tab.name, text, colors)
                        checked += 1
            if key:
                await pilot.press("escape")
                await wait_until(pilot, lambda: not app.screen.is_modal)
    assert checked > 100


def has_drawn(app: ZerotopApp) -> bool:
    """Whether all panels of the shown screen have their text."""
    panels = [panel for panel in app.screen.query(FrameWidget) if panel.region.area]
    return len(panels) > 4 and all(panel.plain_text() for panel in panels)


async def test_no_screen_has_an_emoji() -> None:
    """Fonts of terminals lack them, or draw them in another width."""
    app = ZerotopApp(PlayedSource("story", lambda: 65.0))
    async with app.run_test() as pilot:
        for key in ("question_mark", "escape", "a", "escape", "i", "escape", "ctrl+p"):
            await pilot.press(key)
            await pilot.pause()
            shown = "".join(read_rows(app))
            assert max(shown) < "\u3000", key
