"""Look by itself where a rank's memory is allocated, when it creeps or has a new peak, and record the lines.

The training thread only switches PyTorch's history on, and after a step or two takes it and switches it off. A thread that
lives as long as the look reads it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from zerotop_probe.inside.budget import read_budget
from zerotop_probe.inside.device.allocator import StepMemory
from zerotop_probe.inside.device.memory_history import MemoryHistory
from zerotop_probe.inside.guard import CostMeter, Guard, now
from zerotop_probe.inside.memory_lines.block_lines import describe_peak, describe_staying
from zerotop_probe.inside.memory_lines.memory_watch import MemoryWatch
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.inside.ticker import OWN_THREADS
from zerotop_probe.recording import events
from zerotop_probe.recording.event_values import CREEP, EVALUATION

NAME = "memory lines"
"""The name in the probe's cost and errors."""

# Entries of the history that are kept: of longer steps only their last part is looked at.
_MOST_ENTRIES = 30_000
# A look at an evaluation ends after this many seconds, because the batches of an evaluation are alike.
_EVALUATION_S = 1.0
# A look at steps is given up if they have not ended after this many seconds, or this many times the usual time.
_GIVE_UP_S, _GIVE_UP_FACTOR = 30.0, 4


class LineFinder:
    """The looks of one rank, one at a time."""

    def __init__(
        self, device: int, memory: Any, history: MemoryHistory, write_event: Callable[..., None], meter: CostMeter
    ) -> None:
        """``device`` is the CUDA ordinal in this process, ``memory`` is ``torch.cuda.memory``."""
        self._device = device
        self._memory = memory
        self._history = history
        self._write_event = write_event
        self._meter = meter
        self._guard = Guard(NAME, meter)
        self._watch = MemoryWatch(read_budget())
        self._last_end_ns = 0
        # At most one. Whoever removes it ends it: the training thread, or its own thread if it takes too long.
        self._looks: list[_Look] = []
        self._thread: threading.Thread | None = None

    @property
    def is_looking(self) -> bool:
        """Whether a look is in progress, so that the end of every step counts."""
        return bool(self._looks)

    def end_step(self, step: int, memory: StepMemory | None) -> None:
        """Begin or end a look after a step, on the training thread. ``memory`` is None if it was not read in the step."""
        if self._guard.is_on:
            self._try(self._end_step, step, memory)

    def begin_evaluation(self, step: int, memory: StepMemory | None) -> None:
        """Begin a look at an evaluation, before ``step``, if it is worth one."""
        if self._guard.is_on:
            self._try(self._begin_evaluation, step, memory)

    def end_evaluation(self, memory: StepMemory | None) -> None:
        """End a look at an evaluation, unless it has ended."""
        if self._guard.is_on:
            self._try(self._end_evaluation, memory)

    def _try(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a part of a hook, whose time counts as the hook's."""
        try:
            function(*arguments)
        except BaseException as error:
            self._guard.settle(error)
            self._give_up()

    def _end_step(self, step: int, memory: StepMemory | None) -> None:
        time_ns = now()
        duration_ns, self._last_end_ns = time_ns - self._last_end_ns, time_ns
        why = self._watch.judge_step(step, time_ns, memory, self._meter.total_ns) if memory is not None else ""
        if self._looks:
            self._continue_look(self._looks[0], step)
        elif why:
            wait_s = max(_GIVE_UP_S, _GIVE_UP_FACTOR * duration_ns / 1e9)
            self._begin_look(why, step + 1, time_ns, wait_s)

    def _begin_evaluation(self, step: int, memory: StepMemory | None) -> None:
        time_ns = now()
        why = self._watch.judge_evaluation(time_ns, memory, self._meter.total_ns) if memory is not None else ""
        if why and not self._looks:
            self._begin_look(why, step, time_ns, _EVALUATION_S)

    def _end_evaluation(self, memory: StepMemory | None) -> None:
        if memory is not None:
            self._watch.end_evaluation(memory)
        for look in self._looks.copy():
            if look.why == EVALUATION:
                self._end_look(look)

    def _begin_look(self, why: str, step: int, time_ns: int, wait_s: float) -> None:
        if self._history.is_on or self._history.is_capturing or (self._thread is not None and self._thread.is_alive()):
            return
        look = _Look(why, step, self._watch.begin_look(why, time_ns), time_ns)
        if self._history.is_in_use():
            return
        self._history.start(stacks=True, most_entries=_MOST_ENTRIES, needed_only=True)
        self._looks.append(look)
        self._thread = threading.Thread(target=self._run_look, args=(look, wait_s), name=f"{OWN_THREADS}lines", daemon=True)
        self._thread.start()
        look.cost_ns += now() - time_ns

    def _continue_look(self, look: _Look, step: int) -> None:
        if step + 1 < look.first_step + look.steps:
            look.boundary_us = time.time_ns() // 1000
        else:
            self._end_look(look)

    def _end_look(self, look: _Look) -> None:
        begin_ns = now()
        if self._claim(look):
            snapshot = self._history.stop()
            look.end_ns = now()
            if snapshot is not None:
                look.history = snapshot["device_traces"][self._device]
                look.end_bytes = _read_requested(self._memory.memory_stats(self._device))
            look.cost_ns += now() - begin_ns
            look.has_ended.set()

    def _claim(self, look: _Look) -> bool:
        try:
            self._looks.remove(look)
        except ValueError:
            return False
        return True

    def _run_look(self, look: _Look, wait_s: float) -> None:
        """Wait for the end of a look and record it; the body of its thread."""
        has_ended = look.has_ended.wait(wait_s)
        is_missed = False
        try:
            if not has_ended and look.why == EVALUATION:
                self._end_look(look)
            elif not has_ended and self._claim(look):
                self._history.stop(False)
            if look.history:
                facts = self._record(look)
                is_missed = look.why == CREEP and not facts["staying_bytes"] and len(look.history) < _MOST_ENTRIES
        except Exception as error:
            self._guard.switch_off(error)
        spent_ns = time.thread_time_ns()  # by a thread that did nothing else
        self._meter.thread_ns[NAME] = self._meter.thread_ns.get(NAME, 0) + spent_ns
        self._watch.end_look(len(look.history), look.cost_ns + spent_ns, is_missed=is_missed)

    def _record(self, look: _Look) -> dict[str, Any]:
        history, paths = look.history, PathNames.for_this_process()
        if look.why == CREEP:
            facts = describe_staying(history, look.boundary_us, paths)
        else:
            facts = describe_peak(history, look.end_bytes, paths)
        self._write_event(
            now(),
            events.MemoryLines,
            why=look.why,
            first_step=look.first_step,
            steps=look.steps,
            begin_ns=look.begin_ns,
            end_ns=look.end_ns,
            entries=len(history),
            complete=len(history) < _MOST_ENTRIES,
            seconds=look.cost_ns / 1e9,
            **facts,
        )
        return facts

    def finish(self) -> None:
        """Give up the look in progress, or wait a moment for one that is being recorded: the recording ends."""
        self._give_up()
        if self._thread is not None:
            self._thread.join(1.0)

    def _give_up(self) -> None:
        for look in self._looks.copy():
            if self._claim(look):
                self._guard.run(self._history.stop, False)
                look.has_ended.set()


class _Look:
    """A look in progress. Times are nanoseconds."""

    def __init__(self, why: str, first_step: int, steps: int, begin_ns: int) -> None:
        self.why = why
        self.first_step = first_step
        self.steps = steps
        self.begin_ns = begin_ns
        self.end_ns = 0
        self.boundary_us = 0  # end of the last step but one, unix
        self.end_bytes = 0  # requested at the end
        self.cost_ns = 0  # on the training thread
        self.history: list[dict[str, Any]] = []
        self.has_ended = threading.Event()


def _read_requested(stats: dict[str, int]) -> int:
    return int(stats.get("requested_bytes.all.current", stats["allocated_bytes.all.current"]))
