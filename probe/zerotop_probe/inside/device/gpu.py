"""What a rank's GPU says at the edges of phases: its allocator, and its own clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerotop_probe.inside.device.allocator import Allocator
from zerotop_probe.inside.device.cuda_events import DeviceClock
from zerotop_probe.inside.device.microscope import Microscope
from zerotop_probe.inside.device.ticker import Task, Ticker
from zerotop_probe.inside.guard import Meter
from zerotop_probe.recording.tables import BEGIN, END, PHASE_CODE

if TYPE_CHECKING:
    from zerotop_probe.inside.recorder import Span

# Asking costs more than all the rest of a boundary. So it is done at the edges of outermost phases only, of all but
# these, and at those of an optimizer step's parts.
_NOT_ASKED = frozenset(PHASE_CODE[name] for name in ("data", "other"))
_STEP = PHASE_CODE["step"]

# Steps this short are looked into one time in so many, else only at their end: 20 us at each of their phases' edges would
# be felt in them.
_SHORT_STEP_NS = 20_000_000
_ONE_IN = 4
_INNER = frozenset(
    PHASE_CODE[name]
    for name in ("forward", "backward", "grads_to_cpu", "cpu_optimizer", "params_to_gpu", "optimizer", "allgather")
)


class Device:
    """One GPU as this rank sees it."""

    def __init__(self, allocator: Allocator | None, clock: DeviceClock, microscope: Microscope) -> None:
        """``allocator`` is None where it cannot be read, as one of the job's own."""
        self._allocator = allocator
        self._clock = clock
        self._microscope = microscope
        self._ticker: Ticker | None = None
        self._step_ns = -_SHORT_STEP_NS
        self._closely = True

    @property
    def lost(self) -> int:
        """Records that could not be written so far."""
        return self._clock.lost + self._microscope.lost + (self._allocator.lost if self._allocator is not None else 0)

    def start_ticker(self, stack: list[Span], meter: Meter) -> None:
        """Has a thread look in between, too."""
        tasks: dict[str, Task] = {"microscope requests": self._microscope.poll}
        if self._allocator is not None:
            tasks["allocator ticks"] = self._allocator.tick
        self._ticker = Ticker(stack, tasks, meter)
        self._ticker.start()

    def stop_ticker(self) -> None:
        """Before the interpreter takes itself apart."""
        if self._ticker is not None:
            self._ticker.stop()

    def begins(self, time_ns: int, span: Span, outer: Span | None) -> None:
        """``span`` begins within ``outer``."""
        if not (outer.phase == _STEP if outer is not None else span.phase not in _NOT_ASKED):
            return
        span.asked = self._closely or (span.phase not in _INNER)
        if self._closely or (span.phase not in _INNER and span.phase != _STEP):
            if self._allocator is not None:
                self._allocator.sample(time_ns, span, BEGIN)
            self._clock.begins(span)

    def ends(self, time_ns: int, span: Span) -> None:
        """``span`` ends."""
        if span.asked:
            self._clock.ends(span)
            if self._allocator is not None:
                self._allocator.sample(time_ns, span, END)

    def look(self, time_ns: int, span: Span) -> None:
        """Within ``span``: what its windows are from now on begins anew."""
        if self._allocator is not None:
            self._allocator.sample(time_ns, span, END)

    def step_ended(self, step: int, time_ns: int) -> None:
        """After an optimizer step: decides how closely the next one is looked at."""
        self._closely = step % _ONE_IN == _ONE_IN - 1 or time_ns - self._step_ns >= _SHORT_STEP_NS
        self._step_ns = time_ns
        self._clock.collect()
        self._microscope.step_ended(step)

    def close(self) -> None:
        """Closes the files, and touches no lock: in a forked child the ticker is gone, perhaps holding one."""
        if self._allocator is not None:
            self._allocator.close()
        self._clock.close()
        self._microscope.close()
