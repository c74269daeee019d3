"""For tests of one screen: the app that shows it, its text, and keys."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from textual.app import App
from textual.pilot import Pilot

from waiting import wait_until
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.base.base_screen import MonitorScreen

Kind = TypeVar("Kind", bound=MonitorScreen)


def read_rows(app: App[Any]) -> list[str]:
    """Return the rows of the screen."""
    return [strip.text for strip in app.screen._compositor.render_strips()]


async def resize(pilot: Pilot[Any], size: tuple[int, int]) -> None:
    """Give the terminal another size, of columns and rows; return when the screen fills it."""
    await pilot.resize_terminal(*size)

    def read_size() -> tuple[int, int]:
        rows = read_rows(pilot.app)
        return len(rows[0]), len(rows)

    await wait_until(pilot, lambda: read_size() == size, f"the screen does not become {size}")


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
        return "\n".join(read_rows(self.app))

    async def press_keys(self, *keys: str) -> str:
        for key in keys:
            await self.pilot.press(key)
        await self.wait_until_settled()
        return self.read_text()

    async def wait_until_settled(self) -> None:
        """Wait until the effects of a key are on the screen."""
        await self.pilot.pause()
