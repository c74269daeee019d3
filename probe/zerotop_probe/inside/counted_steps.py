"""Record counted steps: their ends, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerotop_probe.inside import native
from zerotop_probe.inside.budget import COUNTED as COUNTED_DETAIL
from zerotop_probe.inside.counting import StepCounting
from zerotop_probe.inside.guard import CostMeter, Guard
from zerotop_probe.inside.span import Span
from zerotop_probe.inside.span_losses import SpanLosses
from zerotop_probe.recording.interruptions import hide_frames
from zerotop_probe.recording.rings.ring_files import RankFiles, RingFiles, RingTable, TableWriter
from zerotop_probe.recording.tables import BOUNDARY, COUNTED, INCOMPLETE, PHASE_CODE, UNKNOWN

if TYPE_CHECKING:
    from zerotop_probe.inside.recorder import Recorder

_STEP = PHASE_CODE["step"]


class CountedSteps:
    """The counted steps of one rank; the recorder begins them."""

    def __init__(
        self,
        recorder: Recorder,
        counting: StepCounting,
        files: RankFiles,
        writer: TableWriter,
        losses: SpanLosses,
        meter: CostMeter,
    ) -> None:
        """``writer``: of spans, one of ``files``."""
        self._recorder = recorder
        self._counting = counting
        self._writer = writer
        self._losses = losses
        self._meter = meter
        self._guard = Guard("counted steps", meter)
        self._files = files if isinstance(files, RingFiles) else None
        if native.counted_steps is not None and isinstance(files, RingFiles) and isinstance(writer, RingTable):
            self._guard.run(self._share_ring, files, writer)

    def _share_ring(self, files: RingFiles, writer: RingTable) -> None:
        """Let C code write the ends of counted steps."""
        import ctypes  # not every Python has it

        memory = (ctypes.c_char * len(files.ring.memory)).from_buffer(files.ring.memory)
        layout = *files.layout, writer.index, _STEP, BOUNDARY | COUNTED
        self._counting.use_ring(
            memory, ctypes.addressof(memory), layout, files, files.take_slot, self._recorder, self._end_run
        )

    def begin_steps(self, time_ns: int, next_step: int) -> None:
        """Leave out the phases of the steps from ``next_step`` on, which begins now."""
        counting, budget, device = self._counting, self._recorder.budget, self._recorder.device
        counting.first_step, counting.begin_ns = next_step, time_ns
        uncounted = budget.find_uncounted(next_step)
        look = device.find_look(next_step + 1) if device is not None else None
        counting.uncounted_step = uncounted if look is None else min(uncounted, look)
        counting.shortest_ns, counting.longest_ns = budget.like_ns
        counting.is_on = counting.was_on = True
        files, losses = self._files, self._losses
        counting.writes_records = (
            files is not None and files.extend() and self._writer.lost == losses.count == losses.count_at_step
        )
        if files is not None:
            counting.last_slot, counting.table_end = files.position, files.table_end

    def end_step(self, begin_ns: int, time_ns: int, step: int, engine: int, flags: int) -> None:
        """Record the end of a counted step from its optimizer's step alone; ``flags`` is SKIPPED or 0."""
        counting, writer, losses = self._counting, self._writer, self._losses
        flags |= BOUNDARY | COUNTED
        if losses.count != losses.count_at_step:
            flags |= INCOMPLETE
        writer.write(begin_ns, time_ns, UNKNOWN, step, UNKNOWN, UNKNOWN, UNKNOWN, _STEP, flags, 0, engine, 0)
        self._recorder.last_step = step
        duration_ns, counting.begin_ns = time_ns - counting.begin_ns, time_ns
        if writer.lost != losses.count or losses.count != losses.count_at_step:
            losses.follow(time_ns, step, ends_step=True)
        if (
            step + 1 == counting.uncounted_step
            or not counting.shortest_ns <= duration_ns <= counting.longest_ns
            or not counting.is_on
        ):
            self._end_steps(begin_ns, time_ns, step, engine, flags, duration_ns)

    def _end_run(self, begin_ns: int, time_ns: int, step: int, engine: int, flags: int, duration_ns: int) -> None:
        """As :meth:`_end_steps`, for C code that has recorded the end of the last step."""
        try:
            try:
                self._end_steps(begin_ns, time_ns, step, engine, flags, duration_ns)
            except BaseException as error:
                self._guard.settle(error)
        except BaseException as error:
            hide_frames(error)
            raise

    def _end_steps(self, begin_ns: int, time_ns: int, step: int, engine: int, flags: int, duration_ns: int) -> None:
        """Decide after several counted steps whether to go on."""
        counting, recorder = self._counting, self._recorder
        budget, device = recorder.budget, recorder.device
        self.take_cost()
        meter = self._meter
        steps = step + 1 - counting.first_step
        meter.boundaries += steps
        is_measured = device is not None and device.find_look(step + 1) == step + 1
        next_step = step + 1 if counting.is_on and not is_measured else None
        budget.end_step(
            time_ns,
            meter.cost_ns,
            threads_ns=meter.threads_ns,
            next_step=next_step,
            steps=steps,
            last_ns=duration_ns,
        )
        if budget.detail == COUNTED_DETAIL:
            self.begin_steps(time_ns, next_step or 0)
        else:
            counting.stop()
            counting.was_on = False
            span = Span(begin_ns, _STEP, 0, (engine, step, UNKNOWN), loose=False)
            span.end_ns, span.flags = time_ns, flags
            recorder.ended.append(span)
            if device is not None:
                device.end_counted_steps(time_ns, span)
                device.is_full = budget.is_full
        recorder.follow_detail(time_ns)

    def take_cost(self) -> None:
        """Add the cost of the hooks in counted steps to the probe's cost."""
        self._meter.cost_ns += self._counting.cost_ns
        self._counting.cost_ns = 0

    def read_peak(self, time_ns: int) -> None:
        """Read the peak of the last steps if they were only counted, because the recording ends."""
        device, last_step = self._recorder.device, self._recorder.last_step
        if self._counting.was_on and device is not None and last_step is not None:
            device.restart_window(time_ns, Span(time_ns, _STEP, 0, (0, last_step + 1, UNKNOWN), loose=False))

    @property
    def unrecorded_step(self) -> tuple[int, int] | None:
        """The begin (ns) and number of the step in progress if its phases may be missing from the record; else None."""
        counting, last_step = self._counting, self._recorder.last_step
        return (counting.begin_ns, last_step + 1) if counting.was_on and last_step is not None else None

    def resume_phases(self) -> None:
        """Record the rest of the phases of the step in progress. Any thread may call this."""
        self._counting.stop()
