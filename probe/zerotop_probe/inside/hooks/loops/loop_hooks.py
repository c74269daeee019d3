"""Hooks on loops without DeepSpeed: the forwards of their models, every backward, and new optimizers.

They are silent as soon as the process makes a DeepSpeed engine.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

from zerotop_probe.inside.guard import Guard, now, on_removal, wrap_function, wrap_method
from zerotop_probe.inside.hooks.checkpoints import CheckpointHooks
from zerotop_probe.inside.hooks.dataloader import DataLoaderHooks
from zerotop_probe.inside.hooks.generation import GenerationHooks
from zerotop_probe.inside.hooks.loops.compiler import hide_from_compiler
from zerotop_probe.inside.hooks.loops.lightning import LightningHooks
from zerotop_probe.inside.hooks.loops.loop import Loop
from zerotop_probe.inside.hooks.loops.optimizer_steps import OptimizerStepHooks
from zerotop_probe.inside.hooks.loops.scaler_steps import ScalerHooks
from zerotop_probe.inside.inspection import batch_shape
from zerotop_probe.inside.probe import Probe
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.inside.span import Span
from zerotop_probe.recording.event_values import OBJECTS
from zerotop_probe.recording.interruptions import hide_frames
from zerotop_probe.recording.tables import EVAL, FAILED, PHASE_CODE

_BACKWARD_FUNCTION = "_engine_run_backward"
_FORWARD, _BACKWARD = PHASE_CODE["forward"], PHASE_CODE["backward"]
# Forwards within these are no forwards of their own.
_PHASES_OF_MODELS = ("forward", "backward", "generate")
# Forwards of one micro-step that are recorded: a cell of a recurrent network may be called for every token.
_MAX_FORWARDS = 16
# Backwards after which a loop without an optimizer is recorded all the same.
_BACKWARDS_WITHOUT_OPTIMIZER = 3


class LoopHooks:
    """Hooks on the loop of one process."""

    def __init__(self, probe: Probe, install_others: Callable[[], None]) -> None:
        """``install_others`` installs the hooks of libraries that were imported since the probe entered this process."""
        self._probe = probe
        self._install_others = install_others
        self._loop = Loop(probe, self._begin_forward, self._end_forward)
        self._steps = OptimizerStepHooks(self._loop)
        self._scalers = ScalerHooks(self._steps)
        self._checkpoints = CheckpointHooks(probe)
        self._lightning = LightningHooks(self._loop)
        self._guard = Guard("loops", probe.meter)
        self._is_installed = self._is_awake = False
        self._is_grad_enabled: Callable[[], bool] = lambda: False
        # Since the last backward: the model of the first training forward, and the number of forwards.
        self._first_root = 0
        self._forwards = 0
        # Some loops train in evaluation mode, with dropout off.
        self._trains_in_eval_mode = False
        self._unproven_forward = False

    def install_hooks(self, module: Any) -> None:
        """Wait for an optimizer, or a backward; ``module`` is ``torch.optim.optimizer``."""
        if self._is_installed:
            return
        self._is_installed = True
        self._is_grad_enabled = sys.modules["torch"].is_grad_enabled
        on_removal(self._forget_hooks)
        wrap_method(module.Optimizer, "__init__", self._begin_optimizer, self._end_optimizer, self._probe.meter)
        for hook in (self._begin_forward, self._end_forward, self._begin_backward, self._end_backward):
            hide_from_compiler(hook)
        self._replace_backward()
        self._steps.install_hooks(module)
        self._loop.finder.install_hooks()
        self._probe.retire_loops = self._loop.retire

    def _forget_hooks(self) -> None:
        self._is_installed = self._is_awake = False

    def begin_late(self) -> None:
        """Expect a loop whose optimizer already exists."""
        self._wake()
        self._loop.begin_late()

    def _replace_backward(self) -> None:
        """Wrap the function behind ``backward()`` and ``autograd.grad()``, under both of its names."""
        for owner in (sys.modules["torch.autograd"], sys.modules.get("torch.autograd.graph")):
            original = getattr(owner, _BACKWARD_FUNCTION, None)
            if original is None:
                continue
            wrapper = self._wrap_backward(original)
            hide_from_compiler(wrapper, with_callees=False)
            setattr(owner, _BACKWARD_FUNCTION, wrapper)
            on_removal(functools.partial(setattr, owner, _BACKWARD_FUNCTION, original))

    def _wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        counting, meter = self._probe.counting, self._probe.meter
        wrapper = wrap_function(original, "backward", self._begin_backward, self._end_backward, meter, counting)
        hide_from_compiler(wrapper, with_callees=False)
        if hasattr(wrapper, "counts_backwards"):
            wrapper.counts_backwards = True
            return wrapper

        @functools.wraps(wrapper)
        def call_original(*args: Any, **kwargs: Any) -> Any:
            is_counted = counting.is_on
            try:
                result = wrapper(*args, **kwargs)
            except BaseException as error:
                hide_frames(error)
                raise
            if is_counted:
                counting.backwards += 1  # what an update needs to know
            return result

        call_original.__wrapped__ = original
        return call_original

    # --- optimizers -----------------------------------------------------------------------------------------

    def _begin_optimizer(self, time_ns: int, optimizer: Any, args: Any, kwargs: Any) -> Any:
        return optimizer

    def _end_optimizer(self, optimizer: Any, time_ns: int, flags: int, result: Any) -> None:
        if flags or self._probe.engines.belongs_to_deepspeed:
            return
        self._wake()
        self._loop.find_number(optimizer)
        self._probe.setting_lines.note(time_ns, ("optimizers", OBJECTS))
        if self._probe.entered_late:
            self._install_others()
            self._loop.note_update(optimizer)

    def _wake(self) -> None:
        """Install the other hooks: this process is going to train."""
        if not self._is_awake:
            self._is_awake = True
            DataLoaderHooks(self._probe).install_hooks()
            GenerationHooks(self._probe, self._evaluates).install_hooks()
            self._scalers.install_hooks()
            self._checkpoints.install_hooks()
            self._lightning.install_hooks()
            self._probe.setting_lines.checkpoints.install_hooks()
            self._loop.finder.follow_evaluations(self._loop.is_trained)

    # --- forward --------------------------------------------------------------------------------------------

    def _begin_forward(self, time_ns: int, module: Any, args: Any, kwargs: Any) -> Span | None:
        recorder, state = self._probe.recorder, self._loop.settled
        if (
            state is not None
            and recorder is not None
            and recorder.is_quick
            and not recorder.stack
            and module.training
            and self._forwards < _MAX_FORWARDS
            and get_ident() == self._probe.training_thread
        ):
            roots = self._loop.finder.roots
            if not roots or roots[0]() is not module:
                self._loop.finder.note_root(module)
            self._note_settings(module, args, kwargs)
            self._probe.watch.note_training(module, is_first=not self._forwards)
            span = recorder.begin_quick(time_ns, _FORWARD, state)
            span.batch = args, kwargs
            self._forwards += 1
            if self._first_root in (0, id(module)):
                self._first_root = id(module)
                recorder.last_forward = span
            return span
        if self._probe.counting.is_on:
            if self._is_muted(module):
                return None
            self._probe.counting.stop()  # an evaluation begins
        return self._begin_any_forward(time_ns, module, args, kwargs)

    def _begin_any_forward(self, time_ns: int, module: Any, args: Any, kwargs: Any) -> Span | None:
        gradients = self._is_grad_enabled()
        trains = gradients and (_is_training(module) or self._trains_in_eval_mode)
        if not trains:
            self._note_settings(module, args, kwargs)
        recorder = self._loop.find_recorder(adopt=trains and bool(self._loop.list_optimizers()))
        if recorder is None:
            self._loop.finder.note_root(module)
            return None
        if not self._loop.is_training_thread(trains):
            return None
        self._steps.suspend_step(time_ns)
        recorder.end_loose_spans(time_ns)
        if any(map(recorder.find_phase, _PHASES_OF_MODELS)) or self._forwards >= _MAX_FORWARDS:
            return None
        state, evaluation = self._probe.engines.loop, self._probe.evaluation
        self._loop.finder.note_root(module)
        if trains:
            self._loop.resume_training(time_ns, state)
            self._loop.record_facts(at_update=False)
            self._loop.prepare_forward()
        elif self._evaluates(module) and evaluation is not None and (evaluation.is_open or not recorder.stack):
            evaluation.begin_forward(time_ns, self._loop.get_position())
        span = recorder.begin_span(time_ns, "forward", self._loop.get_position())
        if trains:
            self._note_settings(module, args, kwargs)
            self._probe.watch.note_training(module, is_first=not self._forwards)
            self._forwards += 1
            self._first_root = self._first_root or id(module)
        if not trains or self._first_root == id(module):
            span.rows, span.sequence, span.tokens = batch_shape.measure_batch(args, kwargs)
            recorder.last_forward = span
        span.flags = 0 if trains else EVAL
        self._unproven_forward = gradients and not trains and self._loop.owns_parameters(module)
        return span

    def _note_settings(self, module: Any, args: Any, kwargs: Any) -> None:
        """Note what only forwards show, such as autocast, of a model that is trained, and of a teacher or reference."""
        watch = self._probe.watch
        if not watch.wants_autocast and not watch.wants_other_autocast:
            return
        if not self._loop.owns_parameters(module):
            watch.note_other_autocast()
        elif watch.wants_autocast and self._is_grad_enabled():
            watch.note_forward(module, args, kwargs)

    def _is_muted(self, module: Any) -> bool:
        """Return whether a forward in a counted step is no evaluation."""
        trains = self._is_grad_enabled() and (_is_training(module) or self._trains_in_eval_mode)
        return trains or not self._evaluates(module)

    def _evaluates(self, module: Any) -> bool:
        """Return whether a forward without training is an evaluation, not a teacher's or a reference model's."""
        return not _is_training(module) and self._loop.owns_parameters(module)

    def _end_forward(self, span: Span, time_ns: int, flags: int, result: Any) -> None:
        recorder = self._probe.recorder
        if recorder is None:
            return
        if span.batch is not None:
            self._classify_forward(recorder, span)
        recorder.end_span(span, time_ns, flags)
        if span.flags & EVAL:
            if self._probe.evaluation is not None:
                self._probe.evaluation.end_forward(time_ns)
            if self._unproven_forward:
                self._probe.unused_graphs.note_forward(result, span, time_ns)
            return
        if self._forwards > 1:
            self._probe.unused_graphs.note_forward(result, span, time_ns)
        elif self._probe.unused_graphs.wants_trained:
            self._probe.unused_graphs.note_trained()
        if self._loop.settled is None:
            self._loop.note_output(result)

    def _classify_forward(self, recorder: Recorder, span: Span) -> None:
        """Classify a quick forward at its end, when all objects involved are in the processor's caches."""
        if self._is_grad_enabled():
            self._unproven_forward = False
            if recorder.last_forward is span:
                span.measure_batch()
            span.batch = None
            return
        span.flags |= EVAL  # that of a teacher or a reference model
        span.measure_batch()
        recorder.last_forward = span
        self._forwards -= 1
        if not self._forwards:
            self._first_root = 0

    # --- backward -------------------------------------------------------------------------------------------

    def _begin_backward(self, time_ns: int, outputs: Any, args: Any, kwargs: Any) -> Span | None:
        self._probe.unused_graphs.end_series(time_ns)
        if not kwargs.get("accumulate_grad"):
            if self._probe.engines.loop is not None:
                self._count_backward()  # its gradients may make the next update another one
            return None  # autograd.grad() trains nothing by itself
        loop = self._loop
        recorder = self._probe.recorder
        if (
            loop.settled is not None
            and recorder is not None
            and recorder.is_quick
            and not recorder.stack
            and self._steps.step is None
            and get_ident() == self._probe.training_thread
        ):
            self._trains_in_eval_mode |= self._unproven_forward
            self._probe.watch.note_backward()
            return recorder.begin_quick(time_ns, _BACKWARD, loop.settled)
        if self._probe.engines.belongs_to_deepspeed:
            return None
        if recorder is not None and (recorder.find_phase("backward") or recorder.find_phase("forward")):
            return None  # checkpointed blocks within a backward, or a compiler that traces within a forward
        if self._probe.engines.loop is None:
            loop.backward_total += 1
            if not self._forwards:
                loop.search_roots()
        has_optimizer = bool(loop.list_optimizers())
        recorder = loop.find_recorder(adopt=has_optimizer or loop.backward_total >= _BACKWARDS_WITHOUT_OPTIMIZER)
        if recorder is None or not loop.is_training_thread(True):
            return None
        self._steps.suspend_step(time_ns)
        loop.resume_training(time_ns, self._probe.engines.loop)
        self._trains_in_eval_mode |= self._unproven_forward
        if not has_optimizer:
            loop.record_facts(at_update=True)
        loop.prepare_backward()
        self._probe.watch.note_backward()
        return recorder.begin_span(now(), "backward", loop.get_position())

    def _end_backward(self, span: Span, time_ns: int, flags: int, result: Any) -> None:
        loop, recorder, state = self._loop, self._probe.recorder, self._probe.engines.loop
        if recorder is None:
            return
        recorder.end_span(span, time_ns, flags)
        if state is None:
            return
        if not self._forwards and not self._probe.counting.was_on:
            loop.search_roots()
        self._forwards = self._first_root = 0
        if not flags & FAILED:
            self._count_backward()
            state.backward_count += 1
            if self._steps.stepped_in_backward:
                self._steps.end_backward(recorder, time_ns)
        else:
            self._steps.stepped_in_backward.clear()
        if self._steps.step is not None:
            self._steps.resume_step(time_ns, failed=bool(flags & FAILED))

    def _count_backward(self) -> None:
        if self._probe.counting.backwards:
            self._steps.counter.take_counts()
        self._loop.backward_total += 1


def _is_training(module: Any) -> bool:
    """Return whether a module is in training mode, or the module inside DistributedDataParallel."""
    return bool(module.training or getattr(getattr(module, "module", None), "training", False))
