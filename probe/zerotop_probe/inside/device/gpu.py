"""Sample a rank's GPU at the edges of phases: the allocator's counters and CUDA events."""

from __future__ import annotations

from typing import Protocol

from zerotop_probe.inside.device.allocator import AllocatorSampler, StepMemory
from zerotop_probe.inside.device.cuda_events import DeviceClock
from zerotop_probe.inside.device.microscope import StepMicroscope
from zerotop_probe.inside.device.stream_waits import StreamWaitCounter
from zerotop_probe.inside.guard import CostMeter
from zerotop_probe.inside.span import Span
from zerotop_probe.inside.ticker import Ticker
from zerotop_probe.recording.tables import BEGIN, END, PHASE_CODE, UNKNOWN

# Sampling costs more than the rest of a boundary. It is therefore done only at the edges of outermost phases, except these,
# and of the parts of an optimizer step.
_UNSAMPLED_PHASES = frozenset(PHASE_CODE[name] for name in ("data", "other"))
_STEP_PHASE, _EVAL_PHASE = PHASE_CODE["step"], PHASE_CODE["eval"]

# In light detail these are not sampled, and a step only at its end.
_INNER_PHASES = frozenset(
    PHASE_CODE[name]
    for name in ("forward", "backward", "grads_to_cpu", "cpu_optimizer", "params_to_gpu", "optimizer", "allgather")
)

# The parts of the budget that the two threads may take.
_TICKS_PART, _REQUESTS_PART = 0.15, 0.05


class MemoryListener(Protocol):
    """Receives the memory of steps and evaluations, and the end of the recording."""

    @property
    def is_looking(self) -> bool: ...

    def end_step(self, step: int, memory: StepMemory | None) -> None: ...

    def begin_evaluation(self, step: int, memory: StepMemory | None) -> None: ...

    def end_evaluation(self, memory: StepMemory | None) -> None: ...

    def finish(self) -> None: ...


class RankDevice:
    """The GPU of this rank."""

    def __init__(
        self,
        allocator: AllocatorSampler | None,
        clock: DeviceClock,
        microscope: StepMicroscope,
        line_finder: MemoryListener | None = None,
        stream_waits: StreamWaitCounter | None = None,
    ) -> None:
        """``allocator`` is None if its counters cannot be read, as those of a pluggable allocator.

        ``line_finder`` is None if no stacks are recorded, or PyTorch cannot record those of this allocator.
        """
        self._allocator = allocator
        self._clock = clock
        self._microscope = microscope
        self._line_finder = line_finder
        self._stream_waits = stream_waits
        self._tickers: list[Ticker] = []
        self.is_full = True
        """Whether the step in progress is recorded in full detail."""
        self.held_bytes = self.peak_bytes = UNKNOWN
        """Allocated at the end of the last step after which that was read, and the most in that step."""

    @property
    def lost_records(self) -> int:
        """Number of records lost so far that are not in the files of the rank."""
        return self._microscope.lost_records

    @property
    def allocations(self) -> int | None:
        """The number of blocks that the allocator has handed out, as last read; None if unknown."""
        known = self._allocator.allocations if self._allocator is not None else UNKNOWN
        return known if known != UNKNOWN else None

    def start_tickers(self, stack: list[Span], meter: CostMeter) -> None:
        """Start one thread that samples between boundaries, and one that looks for microscope requests.

        The second reads a file, for which it may have to wait.
        """
        requests = Ticker(stack, "microscope requests", self._microscope.poll, meter, budget_part=_REQUESTS_PART)
        self._tickers = [requests]
        if self._allocator is not None:
            ticks = Ticker(stack, "allocator ticks", self._allocator.sample_between, meter, budget_part=_TICKS_PART)
            self._tickers.append(ticks)
        for ticker in self._tickers:
            ticker.start()

    def stop_tickers(self) -> None:
        """Stop the threads and traces in progress, before the interpreter shuts down or the probe leaves."""
        for ticker in self._tickers:
            ticker.stop()
        self._microscope.finish()
        if self._stream_waits is not None:
            self._stream_waits.stop()
        if self._line_finder is not None:
            self._line_finder.finish()

    def begin_span(self, time_ns: int, span: Span, outer: Span | None) -> None:
        """Sample the begin of ``span``, whose parent is ``outer``."""
        if not (outer.phase == _STEP_PHASE if outer is not None else span.phase not in _UNSAMPLED_PHASES):
            return
        is_step = span.phase == _STEP_PHASE
        samples_begin = self.is_full or (span.phase not in _INNER_PHASES and not is_step)
        span.samples_device = samples_begin or is_step
        if samples_begin:
            if self._allocator is not None:
                self._allocator.sample_edge(time_ns, span, BEGIN)
                if span.phase == _EVAL_PHASE and self._line_finder is not None:
                    self._line_finder.begin_evaluation(span.step, self._allocator.take_memory())
            self._clock.begin_span(span)

    def end_span(self, time_ns: int, span: Span) -> None:
        """Sample the end of ``span``."""
        if span.samples_device:
            self._clock.end_span(span)
            if self._allocator is not None:
                self._allocator.sample_edge(time_ns, span, END)
                if span.phase == _EVAL_PHASE and self._line_finder is not None:
                    self._line_finder.end_evaluation(self._allocator.take_memory())

    def restart_window(self, time_ns: int, span: Span) -> None:
        """End the allocator's peak window within ``span`` and begin the next one."""
        if self._allocator is not None:
            self._allocator.sample_edge(time_ns, span, END)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is recorded that needs the ends of all steps."""
        lookers = (self._line_finder, self._stream_waits)
        return not (self._microscope.is_busy or any(one is not None and one.is_looking for one in lookers))

    def find_look(self, step: int) -> int | None:
        """Return the number of the first step from ``step`` on that is measured and so needs phases; None if unknown."""
        return self._stream_waits.find_look(step) if self._stream_waits is not None else None

    def end_counted_steps(self, time_ns: int, span: Span) -> None:
        """Read the peak of several counted steps; ``span`` is the end of the last one."""
        if self._allocator is not None:
            self._allocator.sample_edge(time_ns, span, END)
        self.end_step(span.step)

    def end_step(self, step: int, *, is_main: bool = True) -> None:
        """Write the device times that are known after an optimizer step; ``is_main``: it ends an iteration."""
        self._clock.write_finished()
        if is_main and self._allocator is not None:
            memory = self._allocator.take_memory()
            if memory is not None:
                self.held_bytes, self.peak_bytes = memory.held, memory.peak
            if self._line_finder is not None:
                self._line_finder.end_step(step, memory)
        if is_main and self._stream_waits is not None:
            self._stream_waits.end_step(step)
        self._microscope.end_step(step)

    def close(self) -> None:
        """Close the microscope's file without taking a lock: in a forked child the ticker is gone and may have held one."""
        if self._stream_waits is not None:
            self._stream_waits.stop()
        self._microscope.close()
