"""How long tests wait for what must come: longer where the machine has much else to do, so that a wait shows only a hang."""

from __future__ import annotations

import os

_MOST_TIMES = 6.0


def lengthen(seconds: float) -> float:
    """Return the seconds times the processes that want to run now for each core, between one and a few."""
    return seconds * min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), _MOST_TIMES)
