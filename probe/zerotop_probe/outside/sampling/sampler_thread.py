"""Threads that run samplers at the agent's ticks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol


class Sampler(Protocol):
    """Records a sample at every tick."""

    def prepare_sampling(self) -> None:
        """Called once in the sampling thread, before the first tick."""

    def take_sample(self, time_ns: int, tick: int) -> None:
        """Record the current state; ``time_ns`` is the tick's time, shared by all samplers of this node."""

    def close(self) -> None:
        """Called once in the sampling thread, after the last tick."""


class SamplerThread(threading.Thread):
    """Runs one sampler. A tick that arrives while the previous one is still being sampled is skipped.

    So a driver that hangs, or a read from /proc that blocks, cannot keep the agent from handling the job's output, signals
    and exit code. A sampler that raises is reported once and ends; the others continue.
    """

    def __init__(self, name: str, sampler: Sampler, *, on_error: Callable[[str, BaseException], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._sampler = sampler
        self._on_error = on_error
        self._condition = threading.Condition()
        self._next_tick: tuple[int, int] | None = None
        self._is_closing = False

    def start_sampling(self) -> None:
        """Start the thread. Under a limit of processes (ulimit -u) that may fail, which is reported."""
        try:
            self.start()
        except RuntimeError as error:
            self._on_error(self.name, error)

    def request_sample(self, time_ns: int, number: int) -> None:
        """Request a sample; return at once."""
        with self._condition:
            self._next_tick = (time_ns, number)
            self._condition.notify()

    def finish_sampling(self, timeout_s: float) -> None:
        """Let the sampler close its files, and wait at most ``timeout_s`` for it."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        if self.ident is not None:
            self.join(timeout_s)

    def run(self) -> None:
        """Run the sampler until it is closed or raises."""
        try:
            self._sampler.prepare_sampling()
            while (tick := self._wait_for_tick()) is not None:
                self._sampler.take_sample(*tick)
            self._sampler.close()
        except Exception as error:
            self._on_error(self.name, error)

    def _wait_for_tick(self) -> tuple[int, int] | None:
        with self._condition:
            # Ticks that arrived during the last sample are dropped: a sample now would not match their time.
            self._next_tick = None
            self._condition.wait_for(lambda: self._is_closing or self._next_tick is not None)
            return None if self._is_closing else self._next_tick
