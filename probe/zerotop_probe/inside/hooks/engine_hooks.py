"""Hooks on the engine: construction, forward, backward, step, checkpoints.

Every ``begin`` hook returns a token for its ``end`` hook, usually the span, or None for calls that are not recorded.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, NamedTuple

from zerotop_probe.inside.engines import EngineState
from zerotop_probe.inside.facts.engine_facts import record_engine
from zerotop_probe.inside.guard import NEVER_COUNTED, Guard, wrap_method
from zerotop_probe.inside.hooks import engine_updates
from zerotop_probe.inside.hooks.checkpoints import CheckpointHooks
from zerotop_probe.inside.hooks.generation import GenerationHooks
from zerotop_probe.inside.hooks.training_hooks import TrainingHooks
from zerotop_probe.inside.inspection import batch_shape
from zerotop_probe.inside.logged_values import read_number
from zerotop_probe.inside.probe import Probe
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.inside.span import Span
from zerotop_probe.recording.tables import BOUNDARY, ENGINE_LOSS, EVAL, FAILED, PHASE_CODE, SKIPPED, UNKNOWN

_SAVE_METHODS = ("save_checkpoint", "save_16bit_model", "save_fp16_model", "_zero3_consolidated_16bit_state_dict")


class _CountedStep(NamedTuple):
    """A call of step() that is recorded only if it updates, and the state before it."""

    begin_ns: int
    engine: Any
    state: EngineState
    step: int
    skipped_steps: int


class _UnknownStep(NamedTuple):
    """A call of step() on an engine that is older than the probe."""

    engine: Any
    step: int


def _count_micro_steps(engine: Any) -> int:
    """Return the micro-steps since the last optimizer step. Wrong with newer accelerate, where step() decides."""
    return int(engine.micro_steps) % int(engine.gradient_accumulation_steps())


def _is_within_forward(recorder: Recorder, time_ns: int) -> bool:
    """Whether a forward belongs to another one or to a generation that is in progress."""
    if not recorder.stack:
        return False
    recorder.end_loose_spans(time_ns)
    return bool(recorder.find_phase("forward") or recorder.find_phase("generate"))


class EngineHooks(TrainingHooks):
    """Hooks on ``DeepSpeedEngine`` in one process."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self._updates = engine_updates.UpdateHooks(probe)
        self._facts_guard = Guard("engine facts", probe.meter)

    def install_hooks(self, engine_class: type) -> None:
        """Wrap the methods that this version of DeepSpeed has."""
        meter, counting, updates = self._probe.meter, self._probe.counting, self._updates
        wrap_method(engine_class, "__init__", self._begin_construction, self._end_construction, meter)
        wrap_method(engine_class, "forward", self._begin_forward, self._end_forward, meter, NEVER_COUNTED)
        wrap_method(engine_class, "backward", self.begin_backward, self.end_backward, meter, NEVER_COUNTED)
        wrap_method(engine_class, "_backward_prologue", self._begin_direct, self._end_failed_direct, meter, counting)
        wrap_method(engine_class, "_backward_epilogue", self._find_direct, self._end_direct, meter, counting)
        wrap_method(engine_class, "allreduce_gradients", self._begin_reduce, self.end_span, meter, counting)
        wrap_method(engine_class, "step", self.begin_step, self.end_step, meter, NEVER_COUNTED)
        wrap_method(engine_class, "_take_model_step", updates.begin_update, updates.end_update, meter, NEVER_COUNTED)
        wrap_method(engine_class, "train", self._change_mode, self.end_span, meter, counting)
        for name in _SAVE_METHODS:
            wrap_method(engine_class, name, self.make_phase_hook("checkpoint_save"), self.end_span, meter)
        wrap_method(engine_class, "load_checkpoint", self.make_phase_hook("checkpoint_load"), self.end_span, meter)

    # --- construction ---------------------------------------------------------------------------------------

    def _begin_construction(self, time_ns: int, engine: Any, args: Any, kwargs: Any) -> tuple[Any, Span] | None:
        if not self._probe.start_recording() or self._probe.recorder is None or self._probe.recorder.find_phase("init"):
            return None
        self._probe.claim_for_deepspeed()
        self.resume_training(time_ns)
        step = self._probe.engines.get_position()[1]
        position = (min(self._probe.engines.next_number, 255), step, 0)
        return engine, self._probe.recorder.begin_span(time_ns, "init", position)

    def _end_construction(self, token: tuple[Any, Span], time_ns: int, flags: int, result: Any) -> None:
        engine, span = token
        self.end_span(span, time_ns, flags, result)
        if not flags:
            self.adopt_engine(engine)

    def adopt_engine(self, engine: Any) -> None:
        """Add an engine that is ready to train, and record its facts."""
        probe = self._probe
        if probe.recorder is None or probe.engines.find_state(engine) is not None:
            return
        probe.claim_for_deepspeed()
        state = probe.engines.add(engine)
        self._facts_guard.run_once(record_engine, probe, state, engine)
        if state.has_optimizer or probe.engines.current is None:
            probe.engines.current = state
        if probe.entered_late:
            probe.training_thread = threading.get_ident()
            state.recorded_inventories |= {"init", "before_forward"}  # these moments are past
        CheckpointHooks(probe).install_hooks()
        GenerationHooks(probe, lambda model: not model.training).install_hooks()
        self._updates.watch_optimizer(engine, state)
        self._updates.inspect_tensors(state, engine, "init")

    # --- forward and backward -------------------------------------------------------------------------------

    def _begin_forward(self, time_ns: int, engine: Any, args: Any, kwargs: Any) -> Span | None:
        probe, recorder = self._probe, self._probe.recorder
        if probe.counting.is_on:
            if engine.module.training or self._is_muted(engine):
                return None
            probe.counting.stop()  # an evaluation begins
        if probe.entered_late or probe.leaving:
            self._claim_unknown(engine)
            if recorder is not None and not recorder.stack:
                self._leave_or_adopt(engine)
                recorder = probe.recorder
        state = probe.engines.find_state(engine)
        if recorder is None or state is None:
            return None
        trains = engine.module.training and sys.modules["torch"].is_grad_enabled()
        if not self.is_training_thread(trains and state.has_optimizer) or _is_within_forward(recorder, time_ns):
            return None
        if "before_forward" not in state.recorded_inventories:
            # Tensors that neither it nor the engine owns are not made by training.
            self._updates.inspect_tensors(state, engine, "before_forward")
        if trains:
            self.resume_training(time_ns, state)
        elif state.has_optimizer and probe.evaluation is not None and (probe.evaluation.is_open or not recorder.stack):
            probe.evaluation.begin_forward(time_ns, state.get_position())
        span = recorder.begin_span(time_ns, "forward", state.get_position())
        span.rows, span.sequence, span.tokens = batch_shape.measure_batch(args, kwargs)
        recorder.last_forward = span
        span.flags = 0 if trains else EVAL
        return span

    def _is_muted(self, engine: Any) -> bool:
        """Return whether a forward in evaluation mode is no evaluation."""
        state = self._probe.engines.find_state(engine)
        return state is None or not state.has_optimizer

    def _claim_unknown(self, engine: Any) -> None:
        """Tell the hooks on loops that an engine trains, which is older than the probe."""
        if self._probe.entered_late and self._probe.engines.find_state(engine) is None:
            self._probe.claim_for_deepspeed()

    def _leave_or_adopt(self, engine: Any, *, stepped: bool = False) -> None:
        """Leave the process, or adopt an engine that is older than the probe, where a whole step may begin."""
        if self._probe.leaving:
            self._probe.leave_process()
        elif self._probe.engines.find_state(engine) is None and (stepped or _count_micro_steps(engine) == 0):
            self.adopt_engine(engine)

    def _end_forward(self, span: Span, time_ns: int, flags: int, result: Any) -> None:
        self.end_span(span, time_ns, flags, result)
        evaluation = self._probe.evaluation
        if span.flags & EVAL and evaluation is not None:
            evaluation.end_forward(time_ns)
            if evaluation.is_open:
                self._probe.unused_graphs.note_forward(result, span, time_ns)
        elif not span.flags & EVAL and self._probe.unused_graphs.wants_trained:
            self._probe.unused_graphs.note_trained()

    def begin_backward(self, time_ns: int, engine: Any, args: Any, kwargs: Any) -> tuple[EngineState, Span] | None:
        if self._probe.counting.is_on:
            counted = self._probe.engines.find_state(engine)
            if counted is not None:
                self._note_loss(counted, args, kwargs)
            return None
        state = self._find_state(time_ns, engine, trains=True)
        if state is None or self._probe.recorder is None or self._probe.recorder.find_phase("backward"):
            return None
        self._note_loss(state, args, kwargs)
        return state, self._probe.recorder.begin_span(time_ns, "backward", state.get_position())

    def end_backward(self, token: tuple[EngineState, Span], time_ns: int, flags: int, result: Any) -> None:
        state, span = token
        self.end_span(span, time_ns, flags, result)
        state.backward_count += not flags & FAILED

    def _note_loss(self, state: EngineState, args: Any, kwargs: Any) -> None:
        """Keep the loss of a backward on the first rank, if it is a number on the host; a pipeline's are no losses."""
        loss = kwargs.get("loss", args[0] if args else None)
        if not state.index and self._probe.is_first_rank and getattr(loss, "grad_fn", None) is not None:
            number = read_number(loss)
            if number is not None:
                state.losses.append(number)

    def _write_loss(self, state: EngineState, time_ns: int) -> None:
        """Record the mean of the losses of a step that has just ended."""
        if state.losses and self._probe.recorder is not None:
            self._probe.recorder.logged.write(time_ns, {"loss": sum(state.losses) / len(state.losses)}, ENGINE_LOSS)
            state.losses.clear()

    # ``loss.backward()`` calls no method of the engine. DeepSpeed's own hooks in the graph mark its begin and
    # end; on a GPU they run in autograd's thread while the training thread waits.

    def _begin_direct(self, time_ns: int, engine: Any, args: Any, kwargs: Any) -> tuple[EngineState, Span] | None:
        recorder, state = self._probe.recorder, self._probe.engines.find_state(engine)
        if recorder is None or state is None or recorder.find_phase("backward"):
            return None
        self.resume_training(time_ns, state)
        state.direct_backward = recorder.begin_span(time_ns, "backward", state.get_position(), loose=True)
        return state, state.direct_backward

    def _end_failed_direct(self, token: tuple[EngineState, Span], time_ns: int, flags: int, result: Any) -> None:
        if flags & FAILED:
            self._end_direct(token, time_ns, flags, result)

    def _find_direct(self, time_ns: int, engine: Any, args: Any, kwargs: Any) -> tuple[EngineState, Span] | None:
        state = self._probe.engines.find_state(engine)
        return (state, state.direct_backward) if state is not None and state.direct_backward is not None else None

    def _end_direct(self, token: tuple[EngineState, Span], time_ns: int, flags: int, result: Any) -> None:
        state, span = token
        state.direct_backward = None
        self.end_backward((state, span), time_ns, flags, result)

    def _begin_reduce(self, time_ns: int, engine: Any, args: Any, kwargs: Any) -> Span | None:
        recorder, state = self._probe.recorder, self._probe.engines.find_state(engine)
        if recorder is None or state is None or recorder.find_phase("reduce"):
            return None
        # Outside of a backward it completes the previous micro-step, as in a pipeline.
        within = recorder.find_phase("backward") is not None
        return recorder.begin_span(time_ns, "reduce", state.get_position(after_backward=not within), brief=within)

    # --- step -----------------------------------------------------------------------------------------------

    def begin_step(self, time_ns: int, engine: Any, args: Any, kwargs: Any) -> Span | _CountedStep | _UnknownStep | None:
        """Before step(), which updates only at a gradient-accumulation boundary."""
        if self._probe.counting.is_on:
            state = self._probe.engines.find_state(engine)
            if state is not None and threading.get_ident() == self._probe.training_thread:
                return _CountedStep(time_ns, engine, state, engine.global_steps, engine.skipped_steps)
            self._probe.counting.stop()
        if self._probe.entered_late and self._probe.engines.find_state(engine) is None:
            self._probe.claim_for_deepspeed()
            return _UnknownStep(engine, engine.global_steps)
        state = self._find_state(time_ns, engine, trains=True)
        if state is None or self._probe.recorder is None or self._probe.recorder.find_phase("step"):
            return None
        # Between two boundaries the call does nothing; the update confirms the span.
        return self._probe.recorder.expect_span(time_ns, "step", state.get_position(after_backward=True))

    def end_step(self, span: Span | _CountedStep | _UnknownStep, time_ns: int, flags: int, result: Any) -> None:
        """After step(); an optimizer step also records the probe's cost."""
        if isinstance(span, _CountedStep):
            self._end_counted(span, time_ns, flags)
            return
        if isinstance(span, _UnknownStep):
            if span.engine.global_steps > span.step:
                self._leave_or_adopt(span.engine, stepped=True)
            return
        current = self._probe.engines.current
        if flags & FAILED and current is not None and current.finished_steps <= span.step:
            span.flags &= ~BOUNDARY  # the engine will make this step again
        self.end_span(span, time_ns, flags, result)
        if span.flags & BOUNDARY and self._probe.recorder is not None:
            if isinstance(current, EngineState):
                self._write_loss(current, time_ns)
            self._probe.recorder.end_step(span, time_ns, can_count=self._can_count())
        if self._probe.leaving and self._probe.recorder is not None and not self._probe.recorder.stack:
            self._probe.leave_process()

    def _can_count(self) -> bool:
        """Return whether the only engine has nothing left to show but its steps."""
        engines = self._probe.engines
        if engines.engine_count != 1 or engines.current is None or self._probe.leaving:
            return False
        return engines.current.recorded_inventories.issuperset(("before_update", "after_update"))

    def _end_counted(self, step: _CountedStep, time_ns: int, flags: int) -> None:
        recorder, engine = self._probe.recorder, step.engine
        if recorder is None:
            return
        if flags & FAILED:
            self._probe.counting.stop()
            span = Span(step.begin_ns, PHASE_CODE["step"], 0, (step.state.index, step.step, UNKNOWN), loose=False)
            span.flags = flags
            recorder.write_span(span, time_ns)
        elif engine.global_steps > step.step:
            step.state.backward_count = 0
            skipped = SKIPPED if engine.skipped_steps > step.skipped_steps else 0
            self._write_loss(step.state, time_ns)
            recorder.counted.end_step(step.begin_ns, time_ns, step.step, step.state.index, skipped)

    # --- shared by all hooks --------------------------------------------------------------------------------

    def make_phase_hook(self, phase: str) -> Any:
        """Return a ``begin`` hook that records a call of an engine method as this phase."""

        def begin_phase(time_ns: int, engine: Any, args: Any, kwargs: Any) -> Span | None:
            state, recorder = self._find_state(time_ns, engine), self._probe.recorder
            if state is None or recorder is None or recorder.find_phase(phase):
                return None
            if phase == "checkpoint_save":
                self._probe.saving_lines.note_save(time_ns)
            return recorder.begin_span(time_ns, phase, state.get_position())

        return begin_phase

    def _change_mode(self, time_ns: int, engine: Any, args: Any, kwargs: Any) -> None:
        """``engine.train()`` ends an evaluation in a hand-written loop."""
        mode = kwargs.get("mode", args[0] if args else True)
        if mode and self._probe.engines.find_state(engine) is not None and self._probe.is_training_thread():
            self.resume_training(time_ns)

    def _find_state(self, time_ns: int, engine: Any, *, trains: bool = False) -> EngineState | None:
        """Return the state of the engine for a call in the training thread, else None."""
        if self._probe.entered_late:
            self._claim_unknown(engine)
        state = self._probe.engines.find_state(engine)
        if state is None or self._probe.recorder is None or not self.is_training_thread(trains):
            return None
        self.resume_training(time_ns, state)
        return state
