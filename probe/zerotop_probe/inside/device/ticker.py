"""A thread that runs tasks ten times a second beside the training.

It starves while the rank holds Python's lock for long: nothing may depend on when it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from zerotop_probe.inside.guard import CostMeter, Guard
from zerotop_probe.inside.span import Span

_PERIOD_S = 0.1

# Called with (step, micro-step, phase).
Task = Callable[[int, int, int], None]


class Ticker:
    """A daemon thread; a task that fails is not called again."""

    def __init__(self, stack: list[Span], tasks: dict[str, Task], meter: CostMeter) -> None:
        """``stack``: the phases in progress, innermost last. ``tasks``: by the name under which errors are reported."""
        self._stack = stack
        self._tasks = [(task, Guard(name, meter)) for name, task in tasks.items()]
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run_tasks, name="zerotop-ticker", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _run_tasks(self) -> None:
        step, micro_step = 0, 0
        while not self._stop_event.wait(_PERIOD_S):
            try:
                span = self._stack[-1]
                step, micro_step, phase = span.step, span.micro_step, span.phase
            except IndexError:
                phase = 0
            for task, guard in self._tasks:
                if guard.is_on:
                    try:
                        task(step, micro_step, phase)
                    except Exception as error:
                        guard.switch_off(error)

    def stop(self) -> None:
        """Stop the thread, before the interpreter shuts down."""
        self._stop_event.set()
        self._thread.join(1.0)
