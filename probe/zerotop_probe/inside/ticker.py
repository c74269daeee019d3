"""A thread that repeats a task while training runs.

It starves while the rank holds Python's lock for long: nothing may depend on when it runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from zerotop_probe.inside.guard import CostMeter, Guard
from zerotop_probe.inside.span import Span

# Called with (step, micro-step, phase); returns the seconds until the next call.
Task = Callable[[int, int, int], float]


class Ticker:
    """A daemon thread that ends if its task fails."""

    def __init__(self, stack: list[Span], name: str, task: Task, meter: CostMeter) -> None:
        """``stack``: the phases in progress, innermost last. Errors are reported under ``name``."""
        self._stack = stack
        self._task = task
        self._guard = Guard(name, meter)
        self._name = name
        self._thread_ns = meter.thread_ns
        self._thread_ns.setdefault(name, 0)
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run_task, name="zerotop-ticker", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _run_task(self) -> None:
        step, micro_step, wait_s = 0, 0, 0.1
        while not self._stop_event.wait(wait_s):
            begin_ns = time.thread_time_ns()
            try:
                span = self._stack[-1]
                step, micro_step, phase = span.step, span.micro_step, span.phase
            except IndexError:
                phase = 0
            try:
                wait_s = self._task(step, micro_step, phase)
            except Exception as error:
                self._guard.switch_off(error)
                return
            self._thread_ns[self._name] += time.thread_time_ns() - begin_ns

    def stop(self) -> None:
        """Stop the thread, before the interpreter shuts down."""
        self._stop_event.set()
        self._thread.join(1.0)
