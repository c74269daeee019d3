"""A container that puts panels at the boxes of ``ui.drawing.layout``."""

from __future__ import annotations

from textual.geometry import NULL_OFFSET, NULL_SPACING, Region, Size
from textual.layout import ArrangeResult, Layout, WidgetPlacement
from textual.reactive import reactive
from textual.widget import Widget

from zerotop.ui.drawing.layout import Box


class Panels(Widget):
    """Panels in given boxes; those without a box are neither shown nor focusable."""

    boxes: reactive[dict[str, Box]] = reactive[dict[str, Box]]({}, repaint=False)

    @property
    def layout(self) -> Layout:
        return _BOX_LAYOUT

    def watch_boxes(self) -> None:
        for child in self.children:
            child.display = child.id in self.boxes
            # Only a child's refresh makes the parent drop its cached arrangement.
            child.refresh(layout=True)


class _BoxLayout(Layout):
    name = "boxes"

    def arrange(self, parent: Widget, children: list[Widget], size: Size, greedy: bool = True) -> ArrangeResult:
        assert isinstance(parent, Panels)
        return [
            WidgetPlacement(Region(box.x, box.y, box.width, box.height), NULL_OFFSET, NULL_SPACING, child)
            for child in children
            if (box := parent.boxes.get(child.id or ""))
        ]


_BOX_LAYOUT = _BoxLayout()
