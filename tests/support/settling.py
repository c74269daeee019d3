"""For tests of the screens: waiting until what a key or a click began is done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from textual.pilot import Pilot

SOON_S = 0.02  # a call that is due within this belongs to what was begun: screens are painted 60 times a second
PATIENCE_S = 60.0  # of a test, on a machine that has others to work for
MOST_S = 1.0  # what never comes to rest is waited for no longer


async def until_settled(min_sleep: float = 0.0, max_sleep: float = MOST_S) -> None:
    """Waits until the event loop has nothing to do, now and soon.

    Takes the place of Textual's own wait. That compares the clocks of the process and of the wall, sleeps 40 ms a key at
    least, and up to two seconds on a machine that has others to work for.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + max_sleep
    while loop.time() < end:
        await asyncio.sleep(0)
        if loop._ready:  # type: ignore[attr-defined]
            continue
        due = min((call.when() for call in loop._scheduled if not call.cancelled()), default=end)  # type: ignore[attr-defined]
        if due > loop.time() + SOON_S:
            return
        await asyncio.sleep(max(0.0, due - loop.time()))


async def until(pilot: Pilot[Any], true: Callable[[], object], otherwise: str = "it does not come") -> None:
    """Waits for what comes a moment later."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, otherwise
        await pilot.pause(0.01)
