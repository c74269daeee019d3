"""Record the phases and events of one rank, and read the device at the edges of phases."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from zerotop_probe.inside.budget import COUNTED as COUNTED_DETAIL
from zerotop_probe.inside.budget import DetailBudget, read_budget
from zerotop_probe.inside.counted_steps import CountedSteps
from zerotop_probe.inside.counting import StepCounting
from zerotop_probe.inside.device.gpu import RankDevice
from zerotop_probe.inside.engines import LoopState, TrainingState
from zerotop_probe.inside.guard import CostMeter, now
from zerotop_probe.inside.interpreter.cost_records import CostRecords
from zerotop_probe.inside.logged_values import LoggedValues
from zerotop_probe.inside.span import Span
from zerotop_probe.inside.span_losses import SpanLosses
from zerotop_probe.recording import tables
from zerotop_probe.recording.events import Event
from zerotop_probe.recording.rings.ring_files import RingFiles, open_rank_files
from zerotop_probe.recording.tables import BOUNDARY, COUNTED, FAILED, INCOMPLETE, LIGHT, PHASE_CODE
from zerotop_probe.recording.writer import Identity

# After these the steps are worth looking at.
_PAUSES = frozenset(PHASE_CODE[name] for name in ("eval", "checkpoint_save", "checkpoint_load"))
# In a step in light detail, or of a rank without a device, the edges of these are only noted while no phase is around them,
# and recorded at the end of the step: outside of tight loops most of a record's cost is the way to its code and its memory.
_QUICK_PHASES = frozenset(PHASE_CODE[name] for name in ("data", "forward", "backward", "step"))
_MOST_UNWRITTEN = 15
_MOST_HELD = 10_000
_STEP_PHASE = PHASE_CODE["step"]
# Number of outermost phases that are remembered: several iterations.
_ENDED_SPANS = 64


class StepFollower(Protocol):
    """Is called after some steps, on the training thread."""

    def is_due(self, time_ns: int) -> bool: ...

    def end_step(self, time_ns: int, step: int) -> None: ...


class Recorder:
    """The files of this process and the stack of phases in progress, outermost first."""

    def __init__(self, recording: str, identity: Identity, meter: CostMeter, counting: StepCounting | None = None) -> None:
        """``counting``: shared with the hooks, which may leave out phases; without it they never do."""
        self._counting = counting if counting is not None else StepCounting()
        self._may_count = counting is not None
        self._counting.stop()
        self._counting.was_on = False
        self.stack: list[Span] = []
        # The last outermost phases, in the order of their ends.
        self.ended: deque[Span] = deque(maxlen=_ENDED_SPANS)
        self.device: RankDevice | None = None
        self.is_open = True
        self.is_quick = False
        """Whether phases of the step in progress may be recorded at its end."""
        # The last forward with a measured micro-batch.
        self.last_forward: Span | None = None
        # The last finished optimizer step of engine 0, recorded or not.
        self.last_step: int | None = None
        self.files = files = open_rank_files(recording, identity)
        self._meter = meter
        self._span_writer = files.open_table(tables.SPANS)
        self._begin_writer = files.open_table(tables.BEGINS)
        # The process that drains a ring also reads the notes in it.
        self._phases = files.phases if isinstance(files, RingFiles) else None
        self._unwritten: list[Span] = []  # and not yet recorded
        self._end_hold: Callable[[], None] | None = None  # while spans are held back
        self._announced_ns = 0  # begin of the last phase with a record of it
        self.costs = CostRecords(files, meter)
        self.logged = LoggedValues(files)
        self.budget = DetailBudget(read_budget())
        self._losses = SpanLosses(self._span_writer, self.write_event)
        self.followers: list[StepFollower] = []
        self.counted = CountedSteps(self, self._counting, files, self._span_writer, self._losses, meter)

    def begin_span(
        self, time_ns: int, phase: str, position: tuple[int, int, int], *, loose: bool = False, brief: bool = False
    ) -> Span:
        """Record the begin of a phase inside those in progress.

        ``brief``: the phase is too short to write its begin and to read the device.
        """
        if self._counting.is_on:
            self._counting.stop()
        span = Span(time_ns, PHASE_CODE[phase], len(self.stack), position, loose)
        span.is_brief = brief
        if brief:
            span.is_quick = self.is_quick
        else:
            self._announce_span(span, time_ns)
        self.stack.append(span)
        return span

    def expect_span(self, time_ns: int, phase: str, position: tuple[int, int, int]) -> Span:
        """Begin a phase that is recorded only if :meth:`confirm_span` is called, or if it fails."""
        if self._counting.is_on:
            self._counting.stop()
        span = Span(time_ns, PHASE_CODE[phase], len(self.stack), position, loose=False)
        span.is_confirmed = False
        self.stack.append(span)
        return span

    def confirm_span(self, span: Span, time_ns: int) -> None:
        """Record the begin of an expected phase."""
        if not span.is_confirmed:
            span.is_confirmed = True
            self._announce_span(span, time_ns)

    def _announce_span(self, span: Span, time_ns: int) -> None:
        if self.is_quick and not span.depth and span.phase in _QUICK_PHASES and span.begin_ns > self._announced_ns:
            span.samples_device = span.phase == _STEP_PHASE
            self._note_begin(span)
            return
        if self._unwritten:
            self.write_spans()
        self._announced_ns = span.begin_ns
        self._begin_writer.write(span.begin_ns, span.step, span.micro_step, span.phase, span.depth, span.engine, 0)
        self._meter.boundaries += 1
        if self.device is not None:
            self.device.begin_span(time_ns, span, self.stack[span.depth - 1] if span.depth else None)

    def _note_begin(self, span: Span) -> None:
        phases, place = self._phases, 4 * len(self._unwritten)
        if phases is not None:
            span.is_quick = True
            # In this order: a reader takes a place for whole if its first and its last number are the same.
            phases[place] = span.begin_ns
            phases[place + 1] = span.step | span.micro_step << 32
            phases[place + 2] = span.phase | span.engine << 24
            phases[place + 3] = span.begin_ns

    def begin_quick(self, time_ns: int, phase: int, state: TrainingState, *, loose: bool = False) -> Span:
        """Begin one of the outermost phases of a training step. Only if ``is_quick``, and while no phase is in progress."""
        micro_step = state.backward_count
        span = Span(time_ns, phase, 0, (state.index, state.finished_steps, micro_step), loose)
        if phase == _STEP_PHASE:
            span.samples_device = True
            if micro_step:  # that just done
                span.micro_step -= 1
        self.stack.append(span)
        self._note_begin(span)
        return span

    def end_span(self, span: Span, time_ns: int, flags: int = 0) -> None:
        """Record the end of a phase, and of phases that an exception left open inside it."""
        stack = self.stack
        was_open = span in stack
        if was_open:
            while stack[-1] is not span:
                self.end_span(stack[-1], time_ns, flags)
            if span.samples_device and self.device is not None:
                self.device.end_span(time_ns, span)
        # No calls up to the end of the phase: after each of them a signal handler of the job may raise.
        span.flags |= flags
        span.end_ns = time_ns
        is_recorded = span.is_confirmed or flags & FAILED
        if is_recorded:
            self._unwritten += (span,)
        if was_open:
            del stack[-1]
            # The time between phases is unknown in a step that began as a counted one.
            if not span.depth and (not self._counting.was_on or span.flags & BOUNDARY):
                self.ended.append(span)
        if is_recorded and (not span.is_quick or span.flags & BOUNDARY or len(self._unwritten) > _MOST_UNWRITTEN):
            self.write_spans()

    def write_span(self, span: Span, end_ns: int) -> None:
        """Record a whole span that is not, or no longer, on the stack."""
        span.end_ns = end_ns
        self._unwritten.append(span)
        self.write_spans()

    def hold_spans(self, end_hold: Callable[[], None]) -> None:
        """Write no span until :meth:`release_spans`, which ``end_hold`` calls where holding them must end."""
        self._end_hold = end_hold

    def write_all_spans(self) -> None:
        """Record the spans that have ended and are not recorded yet, even those held back: nothing else may follow."""
        if self._end_hold is not None:
            self._end_hold()
        self.write_spans()

    def list_held(self) -> list[Span]:
        """Return the spans that have ended and are not recorded yet."""
        return self._unwritten

    def release_spans(self) -> None:
        """Write the spans that were held back."""
        self._end_hold = None
        self.write_spans()

    def write_spans(self) -> None:
        """Record the spans that have ended and are not recorded yet, unless they are held back."""
        spans, writer = self._unwritten, self._span_writer
        if self._end_hold is not None:
            if len(spans) >= _MOST_HELD:
                self._end_hold()
            return
        while spans:
            span = spans[0]
            del spans[0]
            ends_step = span.flags & BOUNDARY and not span.engine
            if ends_step and self._counting.was_on:
                span.flags |= COUNTED
            flags = span.flags
            if ends_step:
                if self._losses.has_gap:
                    flags |= INCOMPLETE
                if self.device is not None and not self.device.is_full and not flags & COUNTED:
                    flags |= LIGHT
            elif span.phase in _PAUSES:
                self.budget.request_full_detail()
            self._meter.boundaries += 1 + (span.is_quick and not span.is_brief)
            writer.write(
                span.begin_ns,
                span.end_ns,
                span.tokens,
                span.step,
                span.micro_step,
                span.rows,
                span.sequence,
                span.phase,
                flags,
                span.depth,
                span.engine,
                0,
            )
            if ends_step:
                self.last_step = span.step
            self._losses.follow(span.end_ns, span.step, ends_step=bool(ends_step))

    def forget_phases(self, begin_ns: int, evaluation: Span | None) -> None:
        """End the phases in progress that began at or after this time, as nothing else will, except an ``evaluation``."""
        while self.stack and self.stack[-1].begin_ns >= begin_ns and self.stack[-1] is not evaluation:
            span = self.stack[-1]
            span.samples_device = False
            self._counting.stop()
            self.end_span(span, now(), 0 if span.flags & BOUNDARY else FAILED)

    def end_loose_spans(self, time_ns: int) -> None:
        """End the loose phases on top of the stack, which an exception left open, as failed."""
        while self.stack and self.stack[-1].loose:
            self.end_span(self.stack[-1], time_ns, FAILED)

    def current_span(self) -> Span | None:
        """Return the innermost phase in progress."""
        stack = self.stack
        return stack[-1] if stack else None

    def find_phase(self, phase: str) -> Span | None:
        """Return the innermost phase of that name in progress, if any."""
        code = PHASE_CODE[phase]
        for span in reversed(self.stack):
            if span.phase == code:
                return span
        return None

    def end_step(self, span: Span, time_ns: int, loop: LoopState | None = None, *, can_count: bool = False) -> None:
        """Finish an optimizer step after its span was written.

        ``can_count``: nothing speaks against leaving out the phases of the next steps, of ``loop`` or of an engine.
        """
        device = self.device
        if device is not None:
            device.end_step(span.step, is_main=span.engine == 0)
        if span.engine == 0:
            counting, last_ns, steps = self._counting, 0, 1
            if counting.was_on:
                last_ns, steps = time_ns - counting.begin_ns, span.step + 1 - counting.first_step
                counting.stop()
                counting.was_on = False
            self.counted.take_cost()
            can_count = can_count and self._may_count and not self.stack and (device is None or device.is_idle)
            next_step, meter = span.step + 1, self._meter
            allowed = next_step if can_count else None
            self.budget.end_step(
                time_ns, meter.cost_ns, threads_ns=meter.threads_ns, next_step=allowed, steps=steps, last_ns=last_ns
            )
            if device is not None:
                device.is_full = self.budget.is_full
            if self.budget.detail == COUNTED_DETAIL:
                self.counted.begin_steps(time_ns, next_step)
                counting.loop = loop
                counting.engine = span.engine
        self.follow_detail(time_ns)

    def follow_detail(self, time_ns: int) -> None:
        """Record the next step in the detail chosen for it, and the cost so far if it is due."""
        device = self.device
        self.is_quick = self._phases is not None and (device is None or not device.is_full)
        if self.costs.are_due(time_ns):
            self.write_cost(time_ns)
            for follower in self.followers if self.last_step is not None else ():
                if follower.is_due(time_ns):
                    follower.end_step(time_ns, self.last_step)  # type: ignore[arg-type]

    def write_cost(self, time_ns: int) -> None:
        """Record the probe's cost so far, the time of garbage collections, and compilations."""
        self.costs.write(time_ns, self.lost_records, self.last_step)
        self.files.poll(time_ns)

    @property
    def lost_records(self) -> int:
        """Number of records lost so far, in all files."""
        return self.files.lost_records + (self.device.lost_records if self.device else 0)

    def close(self) -> None:
        """Close every file; later records count as lost."""
        self.is_open = self.is_quick = False
        self._counting.stop()
        self._counting.leave_ring()
        self._losses.stop_reporting()
        self.costs.stop()
        if self.device:
            self.device.close()
        self.files.close()

    def write_event(self, time_ns: int, event: type[Event], **facts: Any) -> None:
        self.files.events.write(time_ns, event, **facts)
