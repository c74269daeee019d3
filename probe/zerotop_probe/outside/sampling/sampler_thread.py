"""Sampling in threads of their own, driven by the agent's ticks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol


class Sampler(Protocol):
    """Something that records what it sees at every tick."""

    def prepare_sampling(self) -> None:
        """Called once, in the sampling thread, before the first tick."""

    def take_sample(self, time_ns: int, tick: int) -> None:
        """Records the state now; ``time_ns`` is the tick's time, shared by all samplers of this node."""

    def close(self) -> None:
        """Called once, in the sampling thread, after the last tick."""


class SamplerThread(threading.Thread):
    """Runs one sampler. A tick that comes while the one before is still being sampled is left out.

    So a driver that hangs, or a process whose files under /proc do not answer, cannot keep the agent from
    passing on the job's output, its signals and its exit code. A sampler that raises is reported once and
    ends; the others go on.
    """

    def __init__(self, name: str, sampler: Sampler, *, on_error: Callable[[str, BaseException], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._sampler = sampler
        self._on_error = on_error
        self._condition = threading.Condition()
        self._next_tick: tuple[int, int] | None = None
        self._is_closing = False

    def request_sample(self, time_ns: int, number: int) -> None:
        """Asks for a sample of now; returns at once."""
        with self._condition:
            self._next_tick = (time_ns, number)
            self._condition.notify()

    def finish_sampling(self, timeout_s: float) -> None:
        """Lets the sampler close its files, and waits for that, though not for ever."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        self.join(timeout_s)

    def run(self) -> None:
        """The thread's body."""
        try:
            self._sampler.prepare_sampling()
            while (wanted := self._wait_for_tick()) is not None:
                self._sampler.take_sample(*wanted)
            self._sampler.close()
        except Exception as error:
            self._on_error(self.name, error)

    def _wait_for_tick(self) -> tuple[int, int] | None:
        with self._condition:
            # The ticks of the time that the last sample took are gone: what they would see now is not their
            # time's.
            self._next_tick = None
            self._condition.wait_for(lambda: self._is_closing or self._next_tick is not None)
            return None if self._is_closing else self._next_tick
