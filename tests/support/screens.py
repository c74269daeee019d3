"""For tests of one screen: the app that shows it, its text, and keys."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from textual.pilot import Pilot

from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.base.base_screen import MonitorScreen

Kind = TypeVar("Kind", bound=MonitorScreen)


class Shown(Generic[Kind]):
    """The app with one of its screens."""

    def __init__(self, app: ZerotopApp, pilot: Pilot[Any], kind: type[Kind]) -> None:
        self.app = app
        self.pilot = pilot
        self.kind = kind

    @property
    def screen(self) -> Kind:
        assert isinstance(self.app.screen, self.kind)
        return self.app.screen

    def read_text(self) -> str:
        return "\n".join(strip.text for strip in self.app.screen._compositor.render_strips())

    async def press_keys(self, *keys: str) -> str:
        for key in keys:
            await self.pilot.press(key)
        await self.wait_until_settled()
        return self.read_text()

    async def wait_until_settled(self) -> None:
        """Wait until the effects of a key are on the screen."""
        await self.pilot.pause()
