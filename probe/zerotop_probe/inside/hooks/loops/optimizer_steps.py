"""The steps of PyTorch's optimizers: their phase, and the end of an iteration."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from zerotop_probe.inside import native
from zerotop_probe.inside.engines import LoopState
from zerotop_probe.inside.guard import Guard, now, on_removal
from zerotop_probe.inside.hooks.loops.compiler import hide_from_compiler
from zerotop_probe.inside.hooks.loops.early_steps import EarlySteps
from zerotop_probe.inside.hooks.loops.iteration_counter import IterationCounter
from zerotop_probe.inside.hooks.loops.loop import Loop
from zerotop_probe.inside.hooks.loops.step_in_progress import StepInProgress
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.inside.span import Span
from zerotop_probe.recording.interruptions import hide_frames, is_interruption
from zerotop_probe.recording.tables import BOUNDARY, FAILED, PHASE_CODE

_STEP = PHASE_CODE["step"]


def is_plain_step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a step was given nothing but the optimizer, or None for its closure, as wrappers of optimizers do."""
    if not kwargs:
        return len(args) == 1 or (len(args) == 2 and args[1] is None)
    return len(args) == len(kwargs) == 1 and kwargs.get("closure", kwargs) is None


class OptimizerStepHooks:
    """Hooks on all optimizers and scalers of one process."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._probe = loop.probe
        self.step: StepInProgress | None = None
        self.counter = IterationCounter(loop)
        self._early = EarlySteps(self.counter)
        self.stepped_in_backward: list[Any] = []
        """The optimizers that have stepped in the backward in progress."""
        self._meter = self._probe.meter
        self._counting = self._probe.counting
        self._guard = Guard("optimizer steps", self._meter)

    def install_hooks(self, module: Any) -> None:
        """Listen to all optimizers; ``module`` is ``torch.optim.optimizer``."""
        before, after = self._make_hooks()
        hide_from_compiler(before)
        hide_from_compiler(after)
        code = native.counted_steps
        if code is not None and isinstance(self._counting, code.StepCounting):
            before, after = code.BeforeUpdate(self._counting, before), code.AfterUpdate(self._counting, after)
        for handle in (
            module.register_optimizer_step_pre_hook(before),
            module.register_optimizer_step_post_hook(after),
        ):
            on_removal(handle.remove)

    def _make_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the functions to call before and after each step of an optimizer.

        In counted steps of a loop with a single optimizer they do everything themselves and touch few objects: each that has
        left the processor's caches costs a microsecond.
        """
        counting, guard = self._counting, self._guard
        before_step, after_step, finish_update = self._before_step, self._after_step, self._finish_update

        def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            try:
                if (
                    counting.loop is not None
                    and counting.optimizer == id(optimizer)
                    and not counting.update_ns
                    and is_plain_step(args, kwargs)
                ):
                    counting.update_backwards = counting.backwards
                    counting.update_ns = now()
                else:
                    before_step(optimizer, args, kwargs)
            except BaseException as error:
                hide_frames(error)
                raise

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            try:
                if not counting.update_ns or counting.optimizer != id(optimizer):
                    after_step(optimizer, args, kwargs)
                    return
                time_ns = now()
                try:
                    finish_update(time_ns, optimizer)
                except BaseException as error:
                    guard.settle(error)
                counting.cost_ns += now() - time_ns
            except BaseException as error:
                hide_frames(error)
                raise

        return before, after

    # --- steps ----------------------------------------------------------------------------------------------

    # The guard's work, as in :func:`~zerotop_probe.inside.guard.wrap_function`.

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._guard.is_on and not self._probe.engines.belongs_to_deepspeed:
            begin_ns = now()
            try:
                is_unusual = not is_plain_step(args, kwargs)
                if self._counting.loop is None or not self._begin_counted(begin_ns, optimizer, is_unusual):
                    self._begin_step(begin_ns, optimizer, args, kwargs)
            except BaseException as error:
                self.step = None
                self._guard.settle(error, begin_ns)
            self._meter.cost_ns += now() - begin_ns

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._guard.is_on and not self._probe.engines.belongs_to_deepspeed:
            begin_ns, step = now(), self.step
            try:
                if step is not None and step.begin_ns and not step.is_scaled:
                    self._end_counted(begin_ns, optimizer, step)
                else:
                    self._end_step(begin_ns, optimizer)
            except BaseException as error:
                if step is not None and self.step is step and is_interruption(error):
                    self._guard.run(self._end_again, optimizer, step, begin_ns)  # the update is done, and counts
                span, self.step = step.span if step is not None else None, None
                self._guard.settle(error, span.begin_ns if span is not None else begin_ns)
            self._meter.cost_ns += now() - begin_ns

    def _end_again(self, optimizer: Any, step: StepInProgress, time_ns: int) -> None:
        if step.begin_ns and not step.is_scaled:
            self._end_counted(time_ns, optimizer, step)
        else:
            self._end_step(time_ns, optimizer)

    def _begin_step(self, time_ns: int, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._counting.update_ns = self._counting.depth = 0  # an exception has ended it
        recorder, settled = self._probe.recorder, self.loop.settled
        if (
            settled is not None
            and recorder is not None
            and recorder.is_quick
            and not recorder.stack
            and self.step is None
            and is_plain_step(args, kwargs)
            and get_ident() == self._probe.training_thread
        ):
            self.step = quick = StepInProgress(optimizer)
            quick.depth = 1
            quick.span = recorder.begin_quick(time_ns, _STEP, settled, loose=True)
            return
        recorder = self.loop.find_recorder(adopt=True)
        if recorder is None:
            return
        if recorder.find_phase("backward") is not None:
            self.stepped_in_backward.append(optimizer)
            self.loop.can_count = False  # without the backward such a step would look like any other
            return
        step = self.step
        if step is not None and step.has_closure and step.owner == id(optimizer) and step.was_left(calls=1):
            self._leave_step(recorder, step, time_ns)
            step = None
        if step is not None and step.span is not None and step.span in recorder.stack:
            _note_call(step, optimizer)
            return
        if not self.loop.is_training_thread(True):
            return
        self.loop.resume_training(time_ns, self._probe.engines.loop)
        has_closure = kwargs.get("closure", args[1] if len(args) > 1 else None) is not None
        if has_closure:
            self.loop.can_count = False  # its phases show to which optimizer the steps within it belong
        else:
            self.loop.prepare_update()
        self.step = step = StepInProgress(optimizer, has_closure=has_closure)
        step.depth = 1
        position = self.loop.get_position(after_backward=True)
        if has_closure:
            step.span = recorder.expect_span(now(), "step", position)
            step.span.loose = True
        else:
            step.span = recorder.begin_span(now(), "step", position, loose=True)

    # In counted steps an update has no span until its end.

    def _begin_counted(self, time_ns: int, optimizer: Any, is_unusual: bool) -> bool:
        """Note the begin of an update in a counted step; return False if it must be recorded as in any other step."""
        counting, step = self._counting, self.step
        if counting.update_ns:
            if counting.backwards == counting.update_backwards:  # within the update in progress
                counting.depth += counting.optimizer == id(optimizer)
                return True
            counting.update_ns = counting.depth = 0
        if is_unusual or get_ident() != self._probe.training_thread:
            counting.stop()
            self.step = None
            return False
        # If a backward followed, an exception has ended the step before.
        if step is not None and step.begin_ns and step.backwards == counting.backwards:
            _note_call(step, optimizer)
            return True
        self.step = step = StepInProgress(optimizer)
        step.depth = 1
        step.begin_ns, step.backwards = time_ns, counting.backwards
        return True

    def _end_counted(self, time_ns: int, optimizer: Any, step: StepInProgress) -> None:
        if step.owner == id(optimizer):
            if step.depth > 1:
                step.depth -= 1
            else:
                self.finish_counted(step.begin_ns, time_ns, optimizer, 0)
                self.step = None

    def _finish_update(self, time_ns: int, optimizer: Any) -> None:
        """Record the end of a counted step after an update of the only optimizer."""
        counting, recorder = self._counting, self._probe.recorder
        if counting.depth:
            counting.depth -= 1
            return
        begin_ns, counting.update_ns = counting.update_ns, 0
        state, backwards = counting.loop, counting.backwards
        if state is None or recorder is None or backwards == counting.seen_backwards:
            self.finish_counted(begin_ns, time_ns, optimizer, 0)
            return
        counting.seen_backwards = backwards
        counting.updates += 1
        step = state.finished_steps
        state.finished_steps = step + 1
        recorder.counted.end_step(begin_ns, time_ns, step, state.index, 0)

    def finish_counted(self, begin_ns: int, time_ns: int, optimizer: Any, flags: int) -> None:
        """Record the end of a counted step if this update ends it; ``flags`` is SKIPPED if nothing was updated."""
        recorder, state = self._probe.recorder, self._probe.engines.loop
        if recorder is not None and state is not None and self.counter.finish_step(optimizer):
            self.step = None
            step = state.finished_steps
            state.finished_steps = step + 1
            state.backward_count = 0
            recorder.counted.end_step(begin_ns, time_ns, step, state.index, flags)

    def suspend_step(self, time_ns: int) -> None:
        """Leave the step in progress, whose closure now calls the model."""
        step, recorder = self.step, self._probe.recorder
        if step is not None and step.has_closure and step.span is not None and recorder is not None:
            if step.was_left(calls=0):
                self._leave_step(recorder, step, time_ns)
                return
            if step.span in recorder.stack:
                recorder.end_span(step.span, time_ns)
            step.span = None

    def _leave_step(self, recorder: Recorder, step: StepInProgress, time_ns: int) -> None:
        """Give up a step that an exception has ended."""
        self.step = None
        if step.span is not None and step.span in recorder.stack:
            recorder.end_span(step.span, time_ns, FAILED)

    def resume_step(self, time_ns: int, *, failed: bool) -> None:
        """Return to the step whose closure has called backward(); the update may follow."""
        step, recorder = self.step, self._probe.recorder
        if step is None or not step.has_closure or recorder is None:
            return
        if failed:
            self.step = None
        elif step.span is None:
            self.loop.prepare_update()
            step.span = recorder.begin_span(time_ns, "step", self.loop.get_position(after_backward=True), loose=True)

    def _end_step(self, time_ns: int, optimizer: Any) -> None:
        step, recorder = self.step, self._probe.recorder
        if self.loop.settled is None:
            self.loop.note_update(optimizer)
        if step is None or recorder is None or step.owner != id(optimizer):
            return
        if step.depth > 1 or step.is_scaled:
            step.depth -= 1
            return
        if step.span is None:  # the closure called the model, but no backward() followed
            step.span = recorder.begin_span(time_ns, "step", self.loop.get_position(after_backward=True))
        if step.span in recorder.stack:
            if not step.span.is_confirmed:
                recorder.confirm_span(step.span, step.span.begin_ns)
            self.finish_step(recorder, step.span, optimizer, time_ns, 0)
        self.step = None

    def finish_step(self, recorder: Recorder, span: Span, optimizer: Any, time_ns: int, flags: int) -> None:
        """Record a whole step; ``flags`` is SKIPPED if nothing was updated."""
        ends_iteration, state = self.counter.finish_step(optimizer), self._probe.engines.loop
        if state is not None and not state.finished_steps:
            self._follow_early(recorder, state, span, ends_iteration=ends_iteration)
        # No calls up to the end of the iteration: after each of them a signal handler of the job may raise.
        if ends_iteration and state is not None:
            state.finished_steps += 1
            state.backward_count = 0
            flags |= BOUNDARY
        span.flags |= flags
        self.step = None
        recorder.end_span(span, time_ns)
        if ends_iteration:
            self.loop.finish_iteration(recorder, span, time_ns)

    def end_backward(self, recorder: Recorder, time_ns: int) -> None:
        """End an iteration whose optimizers step during the backward, each as soon as its gradients are ready."""
        optimizers, self.stepped_in_backward = self.stepped_in_backward, []
        ends_iteration = False
        for optimizer in optimizers:
            ends_iteration |= self.counter.finish_step(optimizer)
        state = self._probe.engines.loop
        if state is None or (not ends_iteration and state.finished_steps):
            return
        self.loop.record_facts(at_update=True)
        span = recorder.begin_span(time_ns, "step", self.loop.get_position(after_backward=True), brief=True)
        if not state.finished_steps:
            self._follow_early(recorder, state, span, ends_iteration=ends_iteration)
        if ends_iteration:
            state.finished_steps += 1
            state.backward_count = 0
        recorder.end_span(span, time_ns, BOUNDARY * ends_iteration)
        if ends_iteration:
            self.loop.finish_iteration(recorder, span, time_ns)

    def _follow_early(self, recorder: Recorder, state: LoopState, span: Span, *, ends_iteration: bool) -> None:
        """Before the end of an update: hold it back, or find out which of those held back have ended iterations."""
        backwards = self.loop.backward_total
        if self.counter.rule.early_ends:
            self._early.split(recorder, state, backwards if ends_iteration else None)
        elif not ends_iteration:
            self._early.hold(recorder, state, span, backwards)


def _note_call(step: StepInProgress, optimizer: Any) -> None:
    """Note that the step in progress has called its optimizer."""
    if step.owner == id(optimizer):
        step.depth += 1
        step.was_called = True
        if step.is_scaled:
            step.found_inf = read_found_inf(optimizer)


def read_found_inf(optimizer: Any) -> bool | None:
    """Return whether a fused optimizer will skip its update, None if only the GPU knows."""
    found = getattr(optimizer, "found_inf", None)
    if found is None:  # some are told by an argument instead
        return None if getattr(optimizer, "_step_supports_amp_scaling", False) else False
    return bool(found.item()) if found.device.type == "cpu" else None
