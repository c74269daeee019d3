"""The app that starts with a list, such as the list of recordings, and returns to it."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from textual.app import ScreenStackError
from textual.binding import BindingType
from textual.screen import Screen

from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.base.bars.footer_keys import bind
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.interfaces import Leaving
from zerotop.ui.base.start_interfaces import OpenedRecording, RecordingLibrary, RecordingOpened
from zerotop.ui.start.screen import StartScreen
from zerotop.ui.sweep.screen import SweepScreen

_START = "start"


class ListApp(ZerotopApp):
    """Shows a list, and the recording opened there in the screens of the monitor."""

    DEFAULT_MODE = _START
    BINDINGS: ClassVar[list[BindingType]] = [
        bind("escape", "back", "app.back", "Back", "Back to the list of recordings"),
    ]

    def __init__(self, **options: Any) -> None:
        """``options``: glyphs, settings and clock, see :class:`Monitor`."""
        super().__init__(None, **options)
        self.add_mode(_START, self.make_list_screen)

    @abstractmethod
    def make_list_screen(self) -> Screen[None]:
        """Make the screen with the list."""

    def clear_selection(self) -> None:
        # From Python 3.12 on, the list's input calls this before the list is on the screen stack.
        with contextlib.suppress(ScreenStackError):
            super().clear_selection()

    def open_recording(self, opened: OpenedRecording) -> None:
        """Show a recording on the last screen shown."""
        if not self.is_watching:
            self.set_recording(opened)
            self.switch_mode(self.shown_name)
            self.draw_first_frame()

    def on_recording_opened(self, event: RecordingOpened) -> None:
        if event.beside is not None:
            self.shown_name = "iteration"
        self.open_recording(event.opened)
        if event.beside is not None:
            self.call_after_refresh(self._overlay_recording, event.beside)

    def _overlay_recording(self, path: Path) -> None:
        from zerotop.ui.iteration.screen import IterationScreen  # late, for a quick start

        if self.is_watching and isinstance(self.shown_screen, IterationScreen):
            self.shown_screen.overlay_recording(path)

    def give_up_recording(self, reason: str) -> None:
        """Return to the list, and say why."""
        self.notify(reason, severity="error", timeout=10)
        self.leave_recording(Leaving.QUIT)

    def leave_recording(self, leaving: Leaving) -> None:
        self.call_next(self._return_to_list)

    async def _return_to_list(self) -> None:
        await self.close_screens(_START)

    async def action_back(self) -> None:
        """Leave the recording."""
        self.action_leave()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "back":
            return isinstance(self.screen, MonitorScreen)
        return super().check_action(action, parameters)


class StartApp(ListApp):
    """Lists the user's recordings and running jobs."""

    def __init__(self, library: RecordingLibrary, **options: Any) -> None:
        """``options``: glyphs, settings and clock, see :class:`Monitor`."""
        self._library = library
        super().__init__(**options)

    def make_list_screen(self) -> StartScreen:
        return StartScreen(self._library, self.glyphs, order=self.settings.get("order", "newest"))

    def action_leave(self) -> None:
        """Return from a sweep or recording to the list."""
        if not self.is_watching and isinstance(self.screen, SweepScreen):
            self.pop_screen()
        else:
            super().action_leave()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "back" and isinstance(self.screen, SweepScreen):
            return True
        return super().check_action(action, parameters)

    def on_start_screen_ordered(self, event: StartScreen.Ordered) -> None:
        self.settings.set("order", event.order)
