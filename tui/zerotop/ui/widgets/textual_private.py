"""Private names of Textual (8.2), all in one place to check when Textual is upgraded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from textual._compositor import CompositorUpdate
from textual.app import App
from textual.css.styles import Styles
from textual.css.stylesheet import Stylesheet
from textual.geometry import Region
from textual.screen import Screen
from textual.widget import Widget


class WrittenText(CompositorUpdate):
    """Text with escape sequences, in the only form that the app's display accepts besides a render of whole widgets."""

    def __init__(self, text: str) -> None:
        self._text = text

    def render_segments(self, console: Console) -> str:
        return self._text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._text


def display_text(screen: Screen[Any], text: str) -> None:
    """Write to the terminal. Only ``_display`` keeps Textual's synchronized output and its own writes in order."""
    screen.app._display(screen, WrittenText(text))


def is_paintable(screen: Screen[None]) -> bool:
    """Return whether the screen is on top and no update is batched.

    While the app closes there are no screens, and ``App.screen`` raises; ``App.batch_update`` has no public counterpart that
    tells whether a batch is open.
    """
    app = screen.app
    return app._screen_stack[-1:] == [screen] and not app._batch_count


def count_style_updates(app: App[Any]) -> int:
    """Return how often the app's style sheets have changed."""
    return app._css_update_count


def get_visible_widgets(screen: Screen[None]) -> Mapping[Widget, tuple[Region, Region]]:
    """Return the region and the clip region of each visible widget.

    It is the same object until the layout changes. ``Widget.region`` does not say whether something covers the widget.
    """
    return screen._compositor.visible_widgets


def get_class_styles(stylesheet: Stylesheet, class_name: str) -> Styles | None:
    """Return the styles of the only rule for a class, or None. ``apply`` would go through all rules, and needs a node."""
    rules = stylesheet.rules_map.get(f".{class_name}")
    if rules is None:
        return None
    (rule,) = rules
    return rule.styles
