"""Detect a lost terminal: its window was closed, or its connection broke."""

from __future__ import annotations

import os
import select
import signal
import sys

_GONE_EVENTS = select.POLLHUP | select.POLLERR | select.POLLNVAL


def find_terminal() -> int | None:
    """Return the descriptor of the terminal that keys come from; None if stdin is no terminal."""
    keys = sys.__stdin__
    if keys is None or keys.closed or not os.isatty(keys.fileno()):
        return None
    return keys.fileno()


def is_hung_up(descriptor: int) -> bool:
    """Whether that terminal is gone."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & _GONE_EVENTS for _, event in poll.poll(0))


def exit_hung_up() -> None:
    """End this process by SIGHUP, even if it is ignored: without a terminal nothing can be read or shown."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGHUP)
