"""For tests of the screens: waiting until the effects of a key or a click are on the screen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from textual._context import active_app
from textual.app import App
from textual.pilot import Pilot

from patience import lengthen

SOON_S = 0.02  # a call that is due within this belongs to what was begun
PATIENCE_S = 60.0  # on a machine that has others to work for


async def wait_for_idle_loop(min_sleep: float = 0.0, max_sleep: float = PATIENCE_S) -> None:
    """Wait until the event loop has nothing to do, now and soon.

    Replaces Textual's ``wait_for_idle``, and hence has its parameters. That function compares processor time with elapsed
    time, which takes at least 40 ms a key, and gives up after a second, on a busy machine before anything is done.
    """
    loop: Any = asyncio.get_running_loop()
    deadline = loop.time() + lengthen(PATIENCE_S)
    while True:
        await asyncio.sleep(0)
        assert loop.time() < deadline, "it does not come to rest"
        if loop._ready:
            continue
        app = active_app.get()
        # What is delivered from now on is ignored; the timer that paints a screen goes on until it is closed.
        if app._exit:
            return
        if getattr(app, "is_busy", False):  # a frame is being made on another thread
            await asyncio.sleep(0.001)
            continue
        due = min((call.when() for call in loop._scheduled if not call.cancelled()), default=deadline)
        if due > loop.time() + SOON_S and not _to_be_painted(app):
            return
        await asyncio.sleep(min(SOON_S, max(0.0, due - loop.time())))


def _to_be_painted(app: App[Any]) -> bool:
    """Return whether a screen waits to be painted: on a slow machine its timer may miss a tick."""
    return bool(app._batch_count or (app.screen_stack and app.screen._update_timer._active.is_set()))


async def wait_until(pilot: Pilot[Any], true: Callable[[], object], otherwise: str = "it does not come") -> None:
    """Wait until ``true`` returns something true."""
    begin_s = time.monotonic()
    while not true():
        assert time.monotonic() - begin_s < lengthen(PATIENCE_S), otherwise
        await pilot.pause(0.01)
