"""Wait for the next sample, and for Python's lock then: what the training thread did may be over once that is had."""

from __future__ import annotations

import sys
import threading

from zerotop_probe.inside.guard import now
from zerotop_probe.inside.interpreter.prompt_lock import SHORT_S, wait_promptly

# A thread that sleeps wakes up within this time (ns) after it was due.
_AWAKE_NS = 200_000
# One that asks for the lock when the switch interval is over gets it within this time (ns) from code in Python.
_PASSED_ON_NS = 100_000


class LockWait:
    """The last wait of one thread.

    A sample shows what took the time if nobody held the lock, or if the training thread passed it on, between two
    instructions, because it was asked to. If the training thread gave it away by itself, as PyTorch's functions do, it had
    been in other code when the sample was due. A wait for a core counts as one for the lock: they cannot be told apart.
    """

    def __init__(self) -> None:
        self._waited_ns = self._interval_ns = 0

    def wait(self, event: threading.Event, seconds: float, *, is_prompt: bool) -> bool:
        """Wait as ``event.wait`` does; ``is_prompt``: see ``wait_promptly``."""
        interval_s, due_ns = sys.getswitchinterval(), now() + round(seconds * 1e9)
        is_set = wait_promptly(event, seconds) if is_prompt else event.wait(seconds)
        self._waited_ns = now() - due_ns
        self._interval_ns = round(1e9 * (min(SHORT_S, interval_s) if is_prompt else interval_s))
        return is_set

    @property
    def is_misleading(self) -> bool:
        """Whether the training thread held the lock when the sample was due, and has left that code by itself since."""
        return _AWAKE_NS < self._waited_ns < self._interval_ns

    @property
    def is_late(self) -> bool:
        """Whether a single instruction, or what it called, kept the lock although it was asked for."""
        return self._waited_ns > self._interval_ns + _PASSED_ON_NS
