"""Measure how long the compute stream waits for other streams, in a few steps from time to time.

ZeRO-3 and FSDP gather parameters on separate streams. If one rank is slower, the iterations of all ranks take equally long:
the compute streams of the fast ranks wait for gathers, and that of the slowest rank waits least. Its waits are the transfers
that are not overlapped with computation.

During these steps ``torch.cuda.Stream.wait_event`` is replaced by a wrapper that records events before and after the wait.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from zerotop_probe.inside.budget import read_budget
from zerotop_probe.inside.guard import CostMeter, Guard, now
from zerotop_probe.recording import events
from zerotop_probe.recording.interruptions import hide_frames

NAME = "stream waits"
"""The name in the probe's errors."""

# This many steps in a row are measured. Each look begins at a multiple of the same power of two on all ranks: the smallest
# one whose steps last at least this time (ns), and for which measuring takes at most this part of the budget.
_STEPS, _LEAST_EVERY, _LEAST_NS, _BUDGET_PART = 4, 8, 15_000_000_000, 0.1
# The duration of a step is the mean of at least this many steps: single steps end at irregular times.
_MEASURED_STEPS = 7
# The most waits that are measured in a step, and an estimate (ns) of the cost of measuring a step before the first look.
_MOST_WAITS, _GUESSED_NS = 1024, 1_000_000
# If the events have not completed after this many steps, they are dropped: the GPU may hang.
_MOST_PENDING_STEPS = 16


class _Step:
    """The waits of one step."""

    def __init__(self) -> None:
        self.marks: list[tuple[Any, Any]] = []
        self.waits = 0
        self.starved = 0


class StreamWaitCounter:
    """Measures the waits of one rank's compute stream: the stream that is current when a step ends."""

    def __init__(self, cuda: Any, device: int, write_event: Callable[..., None], meter: CostMeter) -> None:
        """``cuda`` is ``torch.cuda``, ``device`` the CUDA ordinal in this process, ``write_event`` the recorder's."""
        self._cuda = cuda
        self._device = device
        self._write_event = write_event
        self._meter = meter
        self._guard = Guard(NAME, meter)
        # The step at whose end the current measurement of the steps' duration began, its time, and the last result.
        self._since_step = self._since_ns = self._usual_ns = 0
        self._last_step = -1
        self._every = 0  # a look begins at each multiple of this number; 0: at none
        self._cost_ns = _GUESSED_NS  # of measuring a step
        self._spent_ns: list[int] = []  # for each wait in the look in progress
        self._steps: list[_Step] = []
        self._first_step = 0
        self._pending_steps = 0
        self._free_events: list[Any] = []
        self._stream = 0  # handle of the compute stream
        self._wrapper: Any = None
        self._original: Any = None

    @property
    def is_looking(self) -> bool:
        """Whether the step in progress is measured."""
        return self._wrapper is not None

    def find_look(self, step: int) -> int | None:
        """Return the number of the first step from ``step`` on that is to be the first of a look; None if unknown."""
        return -(-step // self._every) * self._every if self._every and self._guard.is_on else None

    def end_step(self, step: int) -> None:
        """Begin, end or read a look after an optimizer step. Called on the training thread.

        Must be called after the step before a look and after each step of a look; other steps may be left out.
        """
        if not self._guard.is_on:
            return
        try:
            if self.is_looking:
                if step != self._last_step + 1:
                    self._drop_look()
                elif len(self._steps) == _STEPS:
                    self.stop()
                    self._count_cost()
                    self._pending_steps = _MOST_PENDING_STEPS
                else:
                    self._steps.append(_Step())
            elif self._steps:
                self._read_look()
            else:
                self._measure_steps(step)
                if self.find_look(step + 1) == step + 1:
                    self._begin_look(step + 1)
            self._last_step = step
        except BaseException as error:
            self._drop_look()
            self._guard.settle(error)

    def _measure_steps(self, step: int) -> None:
        steps = step - self._since_step
        if 0 <= steps < _MEASURED_STEPS and self._since_ns:
            return
        time_ns = now()
        if steps > 0 and self._since_ns:
            self._usual_ns = (time_ns - self._since_ns) // steps
            self._every = self._find_interval()
        self._since_step, self._since_ns = step, time_ns

    def _find_interval(self) -> int:
        part = _BUDGET_PART * read_budget()
        if not part or not self._usual_ns or not has_other_ranks():
            return 0
        least_ns = max(_LEAST_NS, _STEPS * self._cost_ns / part)
        every = _LEAST_EVERY
        while every * self._usual_ns < least_ns:
            every *= 2
        return every

    def _begin_look(self, step: int) -> None:
        stream_class = self._cuda.Stream
        original = vars(stream_class).get("wait_event")
        if original is None:
            return
        self._stream = self._cuda.current_stream(self._device).cuda_stream
        self._first_step, self._spent_ns, self._steps = step, [], [_Step()]

        @functools.wraps(original)
        def wait_event(stream: Any, event: Any) -> Any:
            try:
                begin = self._begin_wait(stream)
                result = original(stream, event)
                if begin is not None:
                    self._end_wait(stream, begin)
                return result
            except BaseException as error:
                hide_frames(error)
                raise

        self._wrapper, self._original = wait_event, original
        stream_class.wait_event = wait_event

    def stop(self) -> None:
        """Restore ``wait_event``."""
        wrapper, self._wrapper = self._wrapper, None
        if wrapper is not None and vars(self._cuda.Stream).get("wait_event") is wrapper:
            self._cuda.Stream.wait_event = self._original

    def _drop_look(self) -> None:
        self.stop()
        self._steps = []

    def _begin_wait(self, stream: Any) -> Any:
        if not self._guard.is_on or not self.is_looking:
            return None
        time_ns = now()
        try:
            # An event recorded into a CUDA graph measures nothing, and a query would end its capture.
            if stream.cuda_stream != self._stream or self._cuda.is_current_stream_capturing():
                return None
            step = self._steps[-1]
            step.waits += 1
            if len(step.marks) == _MOST_WAITS:
                return None
            step.starved += bool(stream.query())
            begin = self._record_event(stream)
            self._spent_ns.append(now() - time_ns)
            return begin
        except BaseException as error:
            self._guard.settle(error)
            return None

    def _end_wait(self, stream: Any, begin: Any) -> None:
        time_ns = now()
        try:
            self._steps[-1].marks.append((begin, self._record_event(stream)))
            self._spent_ns.append(now() - time_ns)
        except BaseException as error:
            self._guard.settle(error)

    def _count_cost(self) -> None:
        # If the GPU's queue is full, a call waits for a free entry, which costs the job nothing. Hence the median.
        spent_ns = sorted(self._spent_ns)
        total_ns = len(spent_ns) * spent_ns[len(spent_ns) // 2] if spent_ns else 0
        self._meter.cost_ns += total_ns
        self._cost_ns = total_ns // _STEPS

    def _record_event(self, stream: Any) -> Any:
        event = self._free_events.pop() if self._free_events else self._cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def _read_look(self) -> None:
        """Write the waits once the GPU has completed the measured steps."""
        self._pending_steps -= 1
        marks = [mark for step in self._steps for mark in step.marks]
        if not marks or not self._pending_steps:
            self._steps = []
        elif not self._cuda.is_current_stream_capturing() and marks[-1][1].query():
            waited = [round(1e6 * sum(begin.elapsed_time(end) for begin, end in step.marks)) for step in self._steps]
            facts = {"waits": [step.waits for step in self._steps], "starved": [step.starved for step in self._steps]}
            self._free_events += [event for mark in marks for event in mark]
            self._steps = []
            self._write_event(now(), events.StreamWaits, first_step=self._first_step, waited_ns=waited, **facts)


def has_other_ranks() -> bool:
    """Return whether this process is one of several ranks."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized() and distributed.get_world_size() > 1
