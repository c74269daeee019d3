"""Record the phases and events of one rank, and read the device at the edges of phases."""

from __future__ import annotations

from collections import deque
from typing import Any

from zerotop_probe.inside.budget import DetailBudget, read_budget
from zerotop_probe.inside.device.gpu import RankDevice
from zerotop_probe.inside.guard import CostMeter
from zerotop_probe.inside.span import Span
from zerotop_probe.recording import events, tables
from zerotop_probe.recording.ring_files import open_rank_files
from zerotop_probe.recording.tables import BOUNDARY, FAILED, INCOMPLETE, LIGHT, PHASE_CODE
from zerotop_probe.recording.writer import Identity

# After these the steps are worth looking at.
_PAUSES = frozenset(PHASE_CODE[name] for name in ("eval", "checkpoint_save", "checkpoint_load"))
_COST_EVERY_NS = 200_000_000
# Reports of lost spans, so that a disk that is full again and again does not use that room up.
_MOST_LOSS_EVENTS = 20
# Outermost phases that are remembered: those of several iterations.
_ENDED_SPANS = 64


class Recorder:
    """The files of this process and the stack of phases in progress, outermost first."""

    def __init__(self, session: str, identity: Identity, meter: CostMeter) -> None:
        self.stack: list[Span] = []
        # The last outermost phases, in the order of their ends.
        self.ended: deque[Span] = deque(maxlen=_ENDED_SPANS)
        self.device: RankDevice | None = None
        self.is_open = True
        # The last forward with a measured micro-batch.
        self.last_forward: Span | None = None
        # The last finished optimizer step of engine 0, recorded or not.
        self.last_step: int | None = None
        self.files = files = open_rank_files(session, identity)
        self._meter = meter
        self._span_writer = files.open_table(tables.SPANS)
        self._begin_writer = files.open_table(tables.BEGINS)
        self._cost_writer = files.open_table(tables.PROBE)
        self._last_cost_ns = -_COST_EVERY_NS
        self._budget = DetailBudget(read_budget())
        self._is_losing_spans = False
        self._spans_lost_before = 0  # when a step's end was recorded last
        self._loss_events = 0

    def begin_span(
        self, time_ns: int, phase: str, position: tuple[int, int, int], *, loose: bool = False, brief: bool = False
    ) -> Span:
        """Record the begin of a phase inside those in progress.

        ``brief``: the phase is so short that its begin is not written and the device is not read.
        """
        span = Span(time_ns, PHASE_CODE[phase], len(self.stack), position, loose)
        if not brief:
            self._announce_span(span, time_ns)
        self.stack.append(span)
        return span

    def expect_span(self, time_ns: int, phase: str, position: tuple[int, int, int]) -> Span:
        """Begin a phase that is recorded only if :meth:`confirm_span` is called, or if it fails."""
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
        self._begin_writer.write(span.begin_ns, span.step, span.micro_step, span.phase, span.depth, span.engine, 0)
        self._meter.boundaries += 1
        if self.device is not None:
            self.device.begin_span(time_ns, span, self.stack[span.depth - 1] if span.depth else None)

    def end_span(self, span: Span, time_ns: int, flags: int = 0) -> None:
        """Record the end of a phase, and of phases that an exception left open inside it."""
        if span in self.stack:
            while self.stack[-1] is not span:
                self.end_span(self.stack[-1], time_ns, flags)
            if self.device is not None:
                self.device.end_span(time_ns, span)
            self.stack.pop()
            if not span.depth:
                span.end_ns = time_ns
                self.ended.append(span)
        span.flags |= flags
        if span.is_confirmed or flags & FAILED:
            self.write_span(span, time_ns)

    def write_span(self, span: Span, end_ns: int) -> None:
        """Record a whole span that is not, or no longer, on the stack."""
        lost_before, flags = self._span_writer.lost, span.flags
        ends_step = bool(flags & BOUNDARY) and span.engine == 0
        if ends_step:
            if lost_before != self._spans_lost_before:
                flags |= INCOMPLETE
            if self.device is not None and not self.device.is_full:
                flags |= LIGHT
        self._span_writer.write(
            span.begin_ns,
            end_ns,
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
        self._meter.boundaries += 1
        if ends_step:
            self.last_step = span.step
        elif span.phase in _PAUSES:
            self._budget.wish_detail()
        if self._span_writer.lost != lost_before:
            self._note_loss(end_ns, span.step)
            return
        self._is_losing_spans = False
        if ends_step:
            self._spans_lost_before = lost_before

    def _note_loss(self, time_ns: int, step: int) -> None:
        if self.is_open and not self._is_losing_spans and self._loss_events < _MOST_LOSS_EVENTS:
            self._loss_events += 1
            self.write_event(time_ns, events.RECORDS_LOST, step=step, why=self._span_writer.last_error)
        self._is_losing_spans = True

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

    def end_step(self, span: Span, time_ns: int) -> None:
        """Finish an optimizer step after its span was written."""
        device = self.device
        if device is not None:
            device.end_step(span.step)
            if span.engine == 0:
                self._budget.end_step(time_ns, self._meter.total_ns)
                device.is_full = self._budget.is_full
        self.write_cost(time_ns)

    def write_cost(self, time_ns: int, *, at_once: bool = False) -> None:
        """Record the probe's cost so far, at most every 200 ms unless ``at_once``."""
        if time_ns - self._last_cost_ns < _COST_EVERY_NS and not at_once:
            return
        self._last_cost_ns = time_ns
        meter = self._meter
        self._cost_writer.write(
            time_ns, meter.total_ns, meter.boundaries, self.lost_records, meter.errors, meter.one_time_ns
        )
        self.files.poll(time_ns)

    @property
    def lost_records(self) -> int:
        """Number of records lost so far, in all files."""
        lost = sum(writer.lost for writer in (self.files.events, self._span_writer, self._begin_writer, self._cost_writer))
        return lost + (self.device.lost_records if self.device else 0)

    def close(self) -> None:
        """Close every file; later records count as lost."""
        self.is_open = False
        if self.device:
            self.device.close()
        self.files.close()

    def write_event(self, time_ns: int, event: str, **facts: Any) -> None:
        """Record an event."""
        self.files.events.write(time_ns, event, **facts)
