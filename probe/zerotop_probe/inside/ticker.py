"""A thread that repeats a task while training runs.

It starves while the rank holds Python's lock for long: nothing may depend on when it runs.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from zerotop_probe.inside.budget import read_budget
from zerotop_probe.inside.guard import CostMeter, Guard
from zerotop_probe.inside.span import Span
from zerotop_probe.recording.interruptions import is_interruption
from zerotop_probe.recording.tables import UNKNOWN

# Called with (step, micro-step, phase) of the innermost phase in progress, unknown between phases; returns the seconds until
# the next call.
Task = Callable[[int, int, int], float]

OWN_THREADS = "zerotop-"
"""Names of the probe's threads begin with this."""

# A task runs at least this often (s), however small the budget.
_LONGEST_REST_S = 5.0


class Ticker:
    """A daemon thread that ends if its task fails."""

    def __init__(
        self,
        stack: list[Span],
        name: str,
        task: Task,
        meter: CostMeter,
        *,
        budget_part: float | None = None,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        """``stack``: the phases in progress, innermost last. Errors are reported under ``name``.

        ``budget_part``: the part of the probe's budget that the task may take: it rests longer after calls that took long.
        Without it the task keeps to a budget itself. ``wait``: how to wait for the next call.
        """
        self._share = None if budget_part is None else budget_part * read_budget()
        self._stack = stack
        self._task, self._wait = task, wait
        self._guard = Guard(name, meter)
        self._name = name
        self._thread_ns = meter.thread_ns
        self._thread_ns.setdefault(name, 0)
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run_task, name=f"{OWN_THREADS}ticker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run_task(self) -> None:
        sys.settrace(None)  # what the job has set for all new threads
        sys.setprofile(None)
        wait_s = 0.1
        while not self._wait(self._stop_event, wait_s):
            begin_ns = time.thread_time_ns()
            try:
                span = self._stack[-1]
                step, micro_step, phase = span.step, span.micro_step, span.phase
            except IndexError:
                step, micro_step, phase = UNKNOWN, UNKNOWN, 0
            try:
                wait_s = self._task(step, micro_step, phase)
            except Exception as error:
                if is_interruption(error):
                    continue
                self._guard.switch_off(error)
                return
            spent_ns = time.thread_time_ns() - begin_ns
            self._thread_ns[self._name] += spent_ns
            if self._share is not None:
                wait_s = max(wait_s, self._find_rest(spent_ns))

    def _find_rest(self, spent_ns: int) -> float:
        """Return how long to wait after a call that took ``spent_ns``, in seconds, to keep to the task's share."""
        return min(_LONGEST_REST_S, spent_ns / 1e9 / self._share) if self._share else _LONGEST_REST_S

    def stop(self) -> None:
        """Stop the thread, before the interpreter shuts down."""
        self._stop_event.set()
        self._thread.join(1.0)
