"""How the stylesheet paints one name in a widget."""

from __future__ import annotations

from rich.style import Style
from textual.dom import DOMNode
from textual.widget import Widget

from zerotop.ui.drawing.theme import STYLES
from zerotop.ui.widgets.textual_private import attach_node

_STYLE_NAMES = frozenset(STYLES)


class Swatch(DOMNode):
    """An unmounted node to look up how the stylesheet paints one name in a widget.

    Component classes would look up all names in all widgets at each style update, a hundred milliseconds each time a screen
    is shown; a widget uses a few of them.
    """

    def __init__(self, name: str, within: Widget) -> None:
        if name not in _STYLE_NAMES:
            raise KeyError(name)
        super().__init__(classes=f"drawn--{name}")
        attach_node(self, within)

    @property
    def style(self) -> Style:
        """The style, with the background that the widget gives it."""
        self.app.stylesheet.apply(self)
        return self.rich_style
