"""Writes what one rank does: phases as they begin and end, rare facts. Asks the device at the edges of phases."""

from __future__ import annotations

from typing import Any

from zerotop_probe.inside.device.gpu import Device
from zerotop_probe.inside.guard import Meter
from zerotop_probe.recording import disk, tables
from zerotop_probe.recording.tables import FAILED, PHASE_CODE, UNKNOWN
from zerotop_probe.recording.writer import EventWriter, Identity, RecordWriter

_COST_EVERY_NS = 200_000_000
# Room on disk for a rank's events: twice what most have. So what was lost on a full disk is told too.
_ROOM_FOR_EVENTS = 1 << 14


class Span:
    """A phase in progress. ``loose``: no function's return ends it, so an exception can leave it behind."""

    __slots__ = (
        "asked",
        "begin_ns",
        "depth",
        "engine",
        "flags",
        "loose",
        "mark",
        "micro_step",
        "phase",
        "real",
        "rows",
        "sequence",
        "step",
        "tokens",
    )

    def __init__(self, begin_ns: int, phase: int, depth: int, place: tuple[int, int, int], loose: bool) -> None:
        """``place`` is (engine, step, micro-step)."""
        self.begin_ns = begin_ns
        self.phase = phase
        self.depth = depth
        self.engine, self.step, self.micro_step = place
        self.loose = loose
        self.asked = False  # the device is asked at its end
        self.mark: Any = None  # where the device came to it
        self.real = True
        self.flags = 0
        self.rows = self.sequence = self.tokens = UNKNOWN


class Recorder:
    """The files of this process and the stack of the phases in progress, outermost first."""

    def __init__(self, session: str, identity: Identity, meter: Meter) -> None:
        self.stack: list[Span] = []
        self.device: Device | None = None
        self.open = True
        # The last forward whose micro-batch was looked at.
        self.last_forward: Span | None = None
        self.events = EventWriter(session, identity)
        disk.reserve(self.events.fileno(), _ROOM_FOR_EVENTS)
        self._meter = meter
        self._spans = RecordWriter(session, tables.SPANS, identity)
        self._begins = RecordWriter(session, tables.BEGINS, identity)
        self._probe = RecordWriter(session, tables.PROBE, identity)
        self._cost_ns = -_COST_EVERY_NS

    def begin(
        self, time_ns: int, phase: str, place: tuple[int, int, int], *, loose: bool = False, brief: bool = False
    ) -> Span:
        """Records that a phase has begun inside those in progress.

        ``brief``: it is over so soon that nobody need know before, and the device is not asked.
        """
        span = Span(time_ns, PHASE_CODE[phase], len(self.stack), place, loose)
        if not brief:
            self._announce(span, time_ns)
        self.stack.append(span)
        return span

    def expect(self, time_ns: int, phase: str, place: tuple[int, int, int]) -> Span:
        """A phase that may turn out to be nothing: recorded only once :meth:`confirm` says that it is something."""
        span = Span(time_ns, PHASE_CODE[phase], len(self.stack), place, loose=False)
        span.real = False
        self.stack.append(span)
        return span

    def confirm(self, span: Span, time_ns: int) -> None:
        """Records an expected phase's beginning."""
        if not span.real:
            span.real = True
            self._announce(span, time_ns)

    def _announce(self, span: Span, time_ns: int) -> None:
        self._begins.write(span.begin_ns, span.step, span.micro_step, span.phase, span.depth, span.engine, 0)
        self._meter.boundaries += 1
        if self.device is not None:
            self.device.begins(time_ns, span, self.stack[span.depth - 1] if span.depth else None)

    def end(self, span: Span, time_ns: int, flags: int = 0) -> None:
        """Records that a phase has ended, and with it whatever an exception left open inside it."""
        if span in self.stack:
            while self.stack[-1] is not span:
                self.end(self.stack[-1], time_ns, flags)
            if self.device is not None:
                self.device.ends(time_ns, span)
            self.stack.pop()
        span.flags |= flags
        if span.real or flags & FAILED:
            self.write(span, time_ns)

    def write(self, span: Span, end_ns: int) -> None:
        """Records a whole span that is not, or no longer, in progress."""
        self._spans.write(
            span.begin_ns,
            end_ns,
            span.tokens,
            span.step,
            span.micro_step,
            span.rows,
            span.sequence,
            span.phase,
            span.flags,
            span.depth,
            span.engine,
            0,
        )
        self._meter.boundaries += 1

    def settle(self, time_ns: int) -> None:
        """Ends as failed what an exception has left open on top."""
        while self.stack and self.stack[-1].loose:
            self.end(self.stack[-1], time_ns, FAILED)

    def current(self) -> Span | None:
        """The innermost phase in progress."""
        stack = self.stack
        return stack[-1] if stack else None

    def inside(self, phase: str) -> Span | None:
        """The innermost phase of that name in progress, if any."""
        code = PHASE_CODE[phase]
        for span in reversed(self.stack):
            if span.phase == code:
                return span
        return None

    def step_ended(self, span: Span, time_ns: int) -> None:
        """After an optimizer step's own span."""
        if self.device is not None:
            self.device.step_ended(span.step, time_ns)
        self.cost(time_ns)

    def cost(self, time_ns: int, *, at_once: bool = False) -> None:
        """Records what the probe has cost so far, unless it has done so a moment ago."""
        if time_ns - self._cost_ns < _COST_EVERY_NS and not at_once:
            return
        self._cost_ns = time_ns
        meter = self._meter
        self._probe.write(time_ns, meter.cost_ns, meter.boundaries, self.lost, meter.errors)

    @property
    def lost(self) -> int:
        """Records that could not be written so far, in all files."""
        lost = sum(writer.lost for writer in (self.events, self._spans, self._begins, self._probe))
        return lost + (self.device.lost if self.device else 0)

    def close(self) -> None:
        """Closes every file; what comes later counts as lost."""
        self.open = False
        if self.device:
            self.device.close()
        for writer in (self.events, self._spans, self._begins, self._probe):
            writer.close()

    def event(self, time_ns: int, event: str, **facts: Any) -> None:
        """Records a rare fact."""
        self.events.write(time_ns, event, **facts)
