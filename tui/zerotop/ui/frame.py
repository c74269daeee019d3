"""One frame of the live screen: everything its widgets draw, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from zerotop.analysis.view import LiveView
from zerotop.ui.drawing.footer import Key, Moment
from zerotop.ui.drawing.output import Pane


@dataclass(frozen=True, slots=True)
class Frame:
    """What is shown now."""

    view: LiveView
    moment: Moment
    output: Pane
    fps: float
    problems: tuple[str, ...]  # sentences of the viewer's own: a dead sampler
    keys: tuple[Key, ...]  # the keys worth naming now
