"""Wait for the next sample, and for Python's lock then: what the training thread did may be over once that is had."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

from zerotop_probe.inside.guard import now
from zerotop_probe.inside.interpreter.prompt_lock import SHORT_S, wait_promptly

# A thread that sleeps wakes up within this time (ns) after it was due.
_AWAKE_NS = 200_000
# One that asks for the lock when the switch interval is over gets it within this time (ns) from code in Python.
_PASSED_ON_NS = 100_000
_SCHEDULING = b"/proc/thread-self/schedstat"


class LockWait:
    """The last wait of one thread.

    A sample shows what took the time if nobody held the lock, or if the training thread passed it on, between two
    instructions, because it was asked to. If the training thread gave it away by itself, as PyTorch's functions do, it had
    been in other code when the sample was due. A wait for a core is none for the lock; where the kernel does not tell them
    apart, it counts as one.
    """

    def __init__(self) -> None:
        self._waited_ns = self._interval_ns = 0
        self._core_wait = CoreWait()

    def wait(self, event: threading.Event, seconds: float, *, is_prompt: bool) -> bool:
        """Wait as ``event.wait`` does; ``is_prompt``: see ``wait_promptly``."""
        core_wait_ns = self._core_wait.read_ns()
        interval_s, due_ns = sys.getswitchinterval(), now() + round(seconds * 1e9)
        is_set = wait_promptly(event, seconds) if is_prompt else event.wait(seconds)
        self._waited_ns = now() - due_ns
        if self._waited_ns > _AWAKE_NS and core_wait_ns is not None:
            self._waited_ns -= (self._core_wait.read_ns() or core_wait_ns) - core_wait_ns
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


class CoreWait:
    """How long the present thread has been runnable without a core.

    Reading keeps Python's lock: the training thread would go on otherwise, before its stack is read. No file stays open,
    whose number the job might close and use for its own.
    """

    def __init__(self) -> None:
        self._libc = None
        with suppress(ImportError, OSError):
            import ctypes  # not every Python has it

            self._libc, self._buffer = ctypes.PyDLL(None), ctypes.create_string_buffer(64)

    def read_ns(self) -> int | None:
        """Return the nanoseconds since the thread began; None if that is unknown."""
        if self._libc is None:
            return None
        file = self._libc.open(_SCHEDULING, os.O_RDONLY | os.O_CLOEXEC)
        if file < 0:
            return None
        count = self._libc.read(file, self._buffer, len(self._buffer))
        self._libc.close(file)
        parts = self._buffer.raw[: max(count, 0)].split()
        return int(parts[1]) if len(parts) > 1 else None
