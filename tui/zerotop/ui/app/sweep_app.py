"""The app of a sweep: its screen, and the recordings of its points."""

from __future__ import annotations

from typing import Any

from textual.screen import Screen

from zerotop.ui.app.start_app import ListApp
from zerotop.ui.app.terminal_lost import is_hung_up
from zerotop.ui.dialogs.yes_no_dialogs import StopDialog
from zerotop.ui.sweep.model import SweepModel
from zerotop.ui.sweep.screen import SweepScreen


class SweepApp(ListApp):
    """Shows a sweep in progress; the results stay on the screen when it has ended."""

    def __init__(self, model: SweepModel, **options: Any) -> None:
        """``options``: glyphs, settings and clock, see :class:`Monitor`."""
        self._model = model
        super().__init__(**options)

    def make_list_screen(self) -> Screen[None]:
        return SweepScreen(self._model, self.glyphs)

    def run_tick(self) -> None:
        """Stop the sweep where the terminal is lost, and leave when a signal has stopped it."""
        progress = self._model.progress
        is_lost = self._terminal is not None and is_hung_up(self._terminal)
        if is_lost and not progress.is_over:
            progress.stop()
        elif progress.is_over and progress.is_stopping() and not is_lost:
            self.exit()
        else:
            super().run_tick()

    def action_leave(self) -> None:
        """Return from a recording to the sweep; ask before a running sweep is stopped."""
        if self.is_watching:
            super().action_leave()
        elif isinstance(self.screen, StopDialog) or self._model.progress.is_over:
            self._leave_sweep(True)
        else:
            sweep = "Stop the sweep? Its results are kept, and it can be resumed later."
            search = "Stop the search? What was measured so far is kept."
            self.push_screen(StopDialog(search if self._model.search else sweep, self.glyphs), self._leave_sweep)

    def _leave_sweep(self, yes: bool | None) -> None:
        if yes:
            self._model.progress.stop()
            self.exit()
