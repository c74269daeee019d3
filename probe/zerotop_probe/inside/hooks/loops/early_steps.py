"""Updates of several optimizers before the first iteration is known to have ended."""

from __future__ import annotations

from bisect import bisect_left

from zerotop_probe.inside.engines import LoopState
from zerotop_probe.inside.hooks.loops.iteration_counter import IterationCounter
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.inside.span import Span
from zerotop_probe.recording.tables import BOUNDARY


class EarlySteps:
    """The first phases of a loop with several optimizers, held back until its iterations are known, and then numbered.

    If one of the optimizers is never stepped, that shows only after several iterations.
    """

    def __init__(self, counter: IterationCounter) -> None:
        self._counter = counter
        # By the backwards before it: the span of an update, and the micro-steps up to it.
        self._updates: dict[int, tuple[Span, int]] = {}

    def hold(self, recorder: Recorder, state: LoopState, span: Span, backwards: int) -> None:
        """Remember an update that may have ended an iteration."""
        if recorder.last_step is None and not state.finished_steps:
            self._updates[backwards] = span, state.backward_count
            recorder.hold_spans(lambda: self._end(recorder, state))

    def _end(self, recorder: Recorder, state: LoopState) -> None:
        """Decide: the process ends, or there are too many phases to hold."""
        self._counter.rule.end_early()
        self.split(recorder, state, None)

    def split(self, recorder: Recorder, state: LoopState, backwards: int | None) -> None:
        """Number the iterations that have ended before the update in progress, the one after this many ``backwards``."""
        rule = self._counter.rule
        ends = [self._updates[end] for end in dict.fromkeys(rule.early_ends) if end != backwards and end in self._updates]
        rule.early_ends = []
        self._updates = {}
        times = [span.end_ns for span, _ in ends]
        for span in (*recorder.list_held(), *recorder.stack) if ends else ():
            done = bisect_left(times, span.begin_ns)
            if done:
                span.step += done
                span.micro_step -= min(span.micro_step, ends[done - 1][1])
        for span, _ in ends:
            span.flags |= BOUNDARY
        if ends:
            state.finished_steps += len(ends)
            state.backward_count -= ends[-1][1]
        recorder.release_spans()
