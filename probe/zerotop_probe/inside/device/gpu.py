"""What a rank's GPU says at the edges of phases: its allocator, and its own clock."""

from __future__ import annotations

from zerotop_probe.inside.device.allocator import AllocatorSampler
from zerotop_probe.inside.device.cuda_events import DeviceClock
from zerotop_probe.inside.device.microscope import Microscope
from zerotop_probe.inside.device.ticker import Task, Ticker
from zerotop_probe.inside.guard import CostMeter
from zerotop_probe.inside.span import Span
from zerotop_probe.recording.tables import BEGIN, END, PHASE_CODE

# Asking costs more than all the rest of a boundary. So it is done at the edges of outermost phases only, of all but
# these, and at those of an optimizer step's parts.
_UNSAMPLED_PHASES = frozenset(PHASE_CODE[name] for name in ("data", "other"))
_STEP_PHASE = PHASE_CODE["step"]

# Steps this short are looked into one time in so many, else only at their end: 20 us at each of their phases' edges would
# be felt in them.
_SHORT_STEP_NS = 20_000_000
_SAMPLED_ONE_IN = 4
_INNER_PHASES = frozenset(
    PHASE_CODE[name]
    for name in ("forward", "backward", "grads_to_cpu", "cpu_optimizer", "params_to_gpu", "optimizer", "allgather")
)


class RankDevice:
    """One GPU as this rank sees it."""

    def __init__(self, allocator: AllocatorSampler | None, clock: DeviceClock, microscope: Microscope) -> None:
        """``allocator`` is None where it cannot be read, as one of the job's own."""
        self._allocator = allocator
        self._clock = clock
        self._microscope = microscope
        self._ticker: Ticker | None = None
        self._last_step_ns = -_SHORT_STEP_NS
        self._samples_inner = True

    @property
    def lost_records(self) -> int:
        """Records that could not be written so far."""
        return (
            self._clock.lost_records
            + self._microscope.lost_records
            + (self._allocator.lost_records if self._allocator is not None else 0)
        )

    def start_ticker(self, stack: list[Span], meter: CostMeter) -> None:
        """Has a thread look in between, too."""
        tasks: dict[str, Task] = {"microscope requests": self._microscope.poll}
        if self._allocator is not None:
            tasks["allocator ticks"] = self._allocator.sample_between
        self._ticker = Ticker(stack, tasks, meter)
        self._ticker.start()

    def stop_ticker(self) -> None:
        """Before the interpreter takes itself apart."""
        if self._ticker is not None:
            self._ticker.stop()

    def begin_span(self, time_ns: int, span: Span, outer: Span | None) -> None:
        """``span`` begins within ``outer``."""
        if not (outer.phase == _STEP_PHASE if outer is not None else span.phase not in _UNSAMPLED_PHASES):
            return
        span.samples_device = self._samples_inner or (span.phase not in _INNER_PHASES)
        if self._samples_inner or (span.phase not in _INNER_PHASES and span.phase != _STEP_PHASE):
            if self._allocator is not None:
                self._allocator.sample_edge(time_ns, span, BEGIN)
            self._clock.begin_span(span)

    def end_span(self, time_ns: int, span: Span) -> None:
        """``span`` ends."""
        if span.samples_device:
            self._clock.end_span(span)
            if self._allocator is not None:
                self._allocator.sample_edge(time_ns, span, END)

    def restart_window(self, time_ns: int, span: Span) -> None:
        """Within ``span``: what its windows are from now on begins anew."""
        if self._allocator is not None:
            self._allocator.sample_edge(time_ns, span, END)

    def end_step(self, step: int, time_ns: int) -> None:
        """After an optimizer step: decides how closely the next one is looked at."""
        self._samples_inner = step % _SAMPLED_ONE_IN == _SAMPLED_ONE_IN - 1 or time_ns - self._last_step_ns >= _SHORT_STEP_NS
        self._last_step_ns = time_ns
        self._clock.write_finished()
        self._microscope.end_step(step)

    def close(self) -> None:
        """Closes the files, and touches no lock: in a forked child the ticker is gone, perhaps holding one."""
        if self._allocator is not None:
            self._allocator.close()
        self._clock.close()
        self._microscope.close()
