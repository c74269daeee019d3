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
_SCHEDULING = "/proc/thread-self/schedstat"


class LockWait:
    """The last wait of one thread.

    A sample shows what took the time if nobody held the lock, or if the training thread passed it on, between two
    instructions, because it was asked to. If the training thread gave it away by itself, as PyTorch's functions do, it had
    been in other code when the sample was due. A wait for a core is none for the lock; where the kernel does not tell them
    apart, it counts as one.
    """

    def __init__(self) -> None:
        self._waited_ns = self._interval_ns = 0
        self._core_wait: CoreWait | None = None

    def wait(self, event: threading.Event, seconds: float, *, is_prompt: bool) -> bool:
        """Wait as ``event.wait`` does, each time in the same thread; ``is_prompt``: see ``wait_promptly``."""
        if self._core_wait is None:
            self._core_wait = CoreWait()
        core_wait_ns = self._core_wait.read_ns()
        interval_s, due_ns = sys.getswitchinterval(), now() + round(seconds * 1e9)
        is_set = wait_promptly(event, seconds) if is_prompt else event.wait(seconds)
        self._waited_ns = now() - due_ns
        if self._waited_ns > _AWAKE_NS:
            self._waited_ns -= self._core_wait.read_ns() - core_wait_ns
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
    """How long the thread that made it has been runnable without a core.

    Reading keeps Python's lock: the training thread would go on otherwise, before its stack is read.
    """

    def __init__(self) -> None:
        self._file, self._read = -1, None
        with suppress(ImportError, OSError, AttributeError):
            import ctypes  # not every Python has it

            self._read, self._buffer = ctypes.PyDLL(None).pread, ctypes.create_string_buffer(64)
            self._read.argtypes = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long
            self._file = os.open(_SCHEDULING, os.O_RDONLY | os.O_CLOEXEC)

    def read_ns(self) -> int:
        """Return the nanoseconds since the thread began; 0 if that is unknown."""
        if self._read is None or self._file < 0:
            return 0
        count = self._read(self._file, self._buffer, len(self._buffer), 0)
        parts = self._buffer.raw[: max(count, 0)].split()
        return int(parts[1]) if len(parts) > 1 else 0

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)
