"""The style that the stylesheet gives to one name in a widget."""

from __future__ import annotations

from functools import lru_cache

from rich.style import Style
from textual.color import TRANSPARENT, Color
from textual.widget import Widget

from zerotop.ui.drawing.theme import STYLES
from zerotop.ui.widgets.textual_private import get_class_styles

_STYLE_NAMES = frozenset(STYLES)


def find_style(name: str, within: Widget) -> Style:
    """Return the style of the rule ``.drawn--name``, with the background that the widget gives it.

    Each name has one rule, with a colour, for all widgets. Component classes would look up all names in all widgets at each
    style update, a hundred milliseconds each time a screen is shown; an unmounted node for each name that a widget uses
    would take a tenth of a millisecond, for Textual to find that rule among all others.
    """
    if name not in _STYLE_NAMES:
        raise KeyError(name)
    rule = get_class_styles(within.app.stylesheet, f"drawn--{name}")
    if rule is None:  # an app without our stylesheet
        return within.rich_style
    background = rule.background if rule.has_rule("background") else TRANSPARENT
    return _compose_style(rule.color, background, str(rule.text_style), within.background_colors[1])


@lru_cache(maxsize=1024)
def _compose_style(color: Color, background: Color, text_style: str, ground: Color) -> Style:
    painted = ground + background
    return Style.parse(text_style) + Style.from_color(
        (painted + color).rich_color, painted.rich_color if painted.a else None
    )
