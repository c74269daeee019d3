"""Text that ``y`` copies: the numbers of the focused panel, or else a fix that stands out, or the main panel's numbers."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

from textual.screen import Screen

from zerotop.analysis.live_view import Iterations
from zerotop.analysis.text_tables import format_tsv
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.frame_widget import RowWidget


@runtime_checkable
class Copyable(Protocol):
    """A panel that copies all of its numbers as tab-separated text with a heading, not only the visible ones."""

    def copy_text(self) -> str:
        """Return the text for the clipboard."""


def collect_copy_text(screen: Screen[Any]) -> str:
    """Return the text to copy from a screen, "" if there is none."""
    is_focused = isinstance(screen.focused, RowWidget)
    if not is_focused and isinstance(screen, MonitorScreen) and (fix := screen.find_shown_fix()):
        return fix
    panel = _find_panel(screen)
    if isinstance(panel, Copyable):
        return panel.copy_text()
    return panel.plain_text() if panel is not None else ""


def _find_panel(screen: Screen[Any]) -> RowWidget | None:
    if isinstance(screen.focused, RowWidget):
        return screen.focused
    main = getattr(screen, "main_panel", "")
    painted = [panel for panel in screen.query("RowWidget") if isinstance(panel, RowWidget) and panel.display]
    return next((panel for panel in painted if panel.id == main), painted[0] if painted else None)


def format_iterations(iterations: Iterations) -> str:
    """A row for each step: its number, whether it was skipped, the seconds of the iteration and of each phase."""
    names = list(iterations.phase_s)
    lines = [("step", "skipped", "iteration_s", *(f"{name}_s" for name in names))]
    for place, step in enumerate(iterations.step.tolist()):
        seconds = [iterations.iteration_s[place], *(iterations.phase_s[name][place] for name in names)]
        skipped = str(int(iterations.skipped[place]))
        lines.append((str(step), skipped, *("" if math.isnan(value) else f"{value:.6f}" for value in seconds)))
    return format_tsv(lines)
