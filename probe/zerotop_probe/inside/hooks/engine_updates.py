"""The parts of an optimizer step: computing, moving data, and whether the update was skipped.

DeepSpeed brackets the parts with its own timers, which do nothing unless wall-clock breakdown is on; a proxy replaces them.
Torch's global optimizer hooks show the inner optimizer.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

from zerotop_probe.inside.engines import EngineState
from zerotop_probe.inside.facts.engine_facts import record_tensors
from zerotop_probe.inside.guard import Guard, call_from_c, now, on_removal, wrap_method
from zerotop_probe.inside.hooks.timer_proxy import WatchedTimers
from zerotop_probe.inside.hooks.training_hooks import TrainingHooks
from zerotop_probe.inside.logged_values import EngineValues
from zerotop_probe.inside.probe import Probe
from zerotop_probe.inside.span import Span
from zerotop_probe.recording import events
from zerotop_probe.recording.interruptions import hide_frames
from zerotop_probe.recording.tables import BOUNDARY, SKIPPED

# Stage 3's method that copies updated parameters to the places where they are used.
_REASSIGN_METHOD = "_reassign_or_swap_out_partitioned_parameters"


class _Update(NamedTuple):
    """The state before an update."""

    state: EngineState
    engine: Any
    span: Span | None
    step: int
    skipped_steps: int
    loss_scale: float | None


class UpdateHooks(TrainingHooks):
    """Hooks on the parts of ``step()`` of the engines of one process."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self._update: _Update | None = None
        self._inner_span: Span | None = None
        self._move_span: Span | None = None
        self._expects_copy = False
        self._is_listening = False
        self._hook_guard = Guard("optimizer hooks", probe.meter)
        self._tensor_guard = Guard("tensors", probe.meter)

    # --- the update as a whole ------------------------------------------------------------------------------

    def begin_update(self, time_ns: int, engine: Any, args: Any, kwargs: Any) -> _Update | None:
        """Before ``_take_model_step``, which every version calls only at a gradient-accumulation boundary."""
        recorder, state = self._probe.recorder, self._probe.engines.find_state(engine)
        if recorder is None or state is None or (self._probe.counting.is_on and not state.uses_loss_scale):
            return None
        span = recorder.find_phase("step")
        if span is not None:
            span.flags |= BOUNDARY
            recorder.confirm_span(span, time_ns)
        if "before_update" not in state.recorded_inventories:
            self.inspect_tensors(state, engine, "before_update")
        scale = read_loss_scale(engine) if state.uses_loss_scale else None
        self._update = _Update(state, engine, span, engine.global_steps, engine.skipped_steps, scale)
        return self._update

    def end_update(self, update: _Update, time_ns: int, flags: int, result: Any) -> None:
        """Reset the count of backwards, and record an overflow."""
        if not flags:
            update.state.backward_count = 0
        self._update = self._inner_span = self._move_span = None
        self._expects_copy = False
        if flags:
            return
        if update.engine.skipped_steps <= update.skipped_steps:
            if "after_update" not in update.state.recorded_inventories:
                self.inspect_tensors(update.state, update.engine, "after_update")
            return
        if update.span is not None:
            update.span.flags |= SKIPPED
        if self._probe.recorder is not None:
            after = read_loss_scale(update.engine)
            facts = {
                "engine": update.state.index,
                "loss_scale_before": update.loss_scale,
                "loss_scale_after": after,
            }
            self._probe.recorder.write_event(time_ns, events.Overflow, step=update.step, **facts)

    def inspect_tensors(self, state: EngineState, engine: Any, when: str) -> None:
        """Record the tensor inventory, which happens once at each ``when``."""
        self._tensor_guard.run_once(record_tensors, self._probe, state, engine, when)

    # --- its parts ------------------------------------------------------------------------------------------

    def watch_optimizer(self, engine: Any, state: EngineState) -> None:
        """Install the hooks on the parts of this engine's updates; record its values."""
        recorder = self._probe.recorder
        if recorder is not None and self._probe.is_first_rank:  # all ranks have the same
            recorder.followers.append(EngineValues(engine, recorder.logged, self._probe.meter))
        self._listen_to_optimizers()
        optimizer = engine.optimizer
        timers = getattr(optimizer, "timers", None)
        if timers is not None:
            optimizer.timers = WatchedTimers(timers, self._make_watchers(optimizer, state), self._probe.meter)
            on_removal(functools.partial(_restore_timers, weakref.ref(optimizer), timers))
        meter, optimizer_class = self._probe.meter, type(optimizer)
        if optimizer_class.__name__ == "BF16_Optimizer":
            wrap_method(optimizer_class, "update_lp_params", self._make_part_hook("allgather"), self.end_span, meter)
        if state.offloads_optimizer:
            wrap_method(optimizer_class, "_wait_for_offload_copies", self._begin_wait, self.end_span, meter)
            wrap_method(optimizer_class, _REASSIGN_METHOD, self._begin_move, self.end_span, meter)

    def _begin_wait(self, time_ns: int, optimizer: Any, args: Any, kwargs: Any) -> Span | None:
        return self._begin_part(time_ns, optimizer, "grads_to_cpu") if optimizer._pending_offload_events else None

    def _begin_move(self, time_ns: int, optimizer: Any, args: Any, kwargs: Any) -> Span | None:
        state = self._update.state if self._update is not None else None
        moves = state is not None and state.offloads_optimizer and not state.offloads_parameters
        return self._begin_part(time_ns, optimizer, "params_to_gpu") if moves else None

    def _make_part_hook(self, phase: str) -> Any:
        return lambda time_ns, optimizer, args, kwargs: self._begin_part(time_ns, optimizer, phase)

    def _begin_part(self, time_ns: int, optimizer: Any, phase: str, *, loose: bool = False) -> Span | None:
        """Begin a part of the update in progress, if it belongs to this optimizer."""
        update, recorder = self._update, self._probe.recorder
        if update is None or recorder is None or update.span is None or update.engine.optimizer is not optimizer:
            return None
        position = update.state.get_position(after_backward=True)
        return recorder.begin_span(time_ns, phase, position, loose=loose, brief=not update.state.offloads_optimizer)

    def _make_watchers(self, optimizer: Any, state: EngineState) -> dict[str, tuple[Any, Any]]:
        """Return the functions to call when a timer starts and stops, by DeepSpeed's name of the timer."""
        watchers = {"optimizer_allgather": self._make_watcher(optimizer, "allgather")}
        if state.offloads_optimizer:
            # With offload, this is the last work on the gradients before the optimizer: unscaling and clipping.
            watchers["optimizer_gradients"] = self._make_watcher(optimizer, "grads_to_cpu")
            if not hasattr(optimizer, _REASSIGN_METHOD):
                watchers["optimizer_step"] = (self._expect_copy, self._end_copy)
        return watchers

    def _make_watcher(self, optimizer: Any, phase: str) -> tuple[Any, Any]:
        spans: list[Span] = []

        def start_span() -> None:
            # After an overflow DeepSpeed starts and stops all its timers without doing anything.
            overflow = getattr(optimizer, "overflow", False)
            span = None if overflow else self._begin_part(now(), optimizer, phase, loose=True)
            if span is not None:
                spans.append(span)

        def stop_span() -> None:
            if spans:
                self.end_span(spans.pop(), now(), 0, None)

        return start_span, stop_span

    # --- the inner optimizer, and the copy of updated parameters after it -----------------------------------

    def _expect_copy(self) -> None:
        self._expects_copy = True

    def _end_copy(self) -> None:
        self._expects_copy = False
        span, self._move_span = self._move_span, None
        if span is not None:
            self.end_span(span, now(), 0, None)

    def _listen_to_optimizers(self) -> None:
        if self._is_listening:
            return
        self._is_listening = True
        from torch.optim import optimizer as torch_optimizer

        register_before = getattr(torch_optimizer, "register_optimizer_step_pre_hook", None)
        register_after = getattr(torch_optimizer, "register_optimizer_step_post_hook", None)
        if register_before is not None and register_after is not None:
            handles = register_before(call_from_c(self._before_inner)), register_after(call_from_c(self._after_inner))
            on_removal(lambda: self._stop_listening(handles))

    def _stop_listening(self, handles: tuple[Any, Any]) -> None:
        self._is_listening = False
        for handle in handles:
            handle.remove()

    def _before_inner(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._update is not None and self._update.span is not None:
            try:
                self._hook_guard.run(self._begin_inner, optimizer, self._update)
            except BaseException as error:
                hide_frames(error)
                raise

    def _begin_inner(self, optimizer: Any, update: _Update) -> None:
        recorder = self._probe.recorder
        if recorder is None or self._inner_span is not None or not self._probe.is_training_thread():
            return
        state = update.state
        name = state.inner_phases.get(id(optimizer))
        if name is None:
            name = "cpu_optimizer" if runs_on_cpu(optimizer, state, update.engine) else "optimizer"
            state.inner_phases[id(optimizer)] = name
        position = state.get_position(after_backward=True)
        self._inner_span = recorder.begin_span(now(), name, position, loose=True, brief=not state.offloads_optimizer)

    def _after_inner(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._inner_span is not None:
            try:
                self._hook_guard.run(self._end_inner)
            except BaseException as error:
                hide_frames(error)
                raise

    def _end_inner(self) -> None:
        time_ns = now()
        inner, self._inner_span = self._inner_span, None
        if inner is None:
            return
        self.end_span(inner, time_ns, 0, None)
        if self._expects_copy and self._update is not None and self._probe.recorder is not None:
            position = self._update.state.get_position(after_backward=True)
            self._move_span = self._probe.recorder.begin_span(time_ns, "params_to_gpu", position, loose=True)


def _restore_timers(reference: weakref.ref[Any], timers: Any) -> None:
    optimizer = reference()
    if optimizer is not None and isinstance(optimizer.timers, WatchedTimers):
        optimizer.timers = timers


def runs_on_cpu(optimizer: Any, state: EngineState, engine: Any) -> bool:
    """Return whether this inner optimizer computes on the CPU because of offload."""
    if type(optimizer).__name__.startswith("DeepSpeedCPU"):
        return True
    if not state.offloads_optimizer and getattr(engine.device, "type", "cpu") == "cpu":
        return False
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    first = next(parameters, None)
    return first is not None and first.device.type == "cpu"


def read_loss_scale(engine: Any) -> float | None:
    """Return the current loss scale, or None. Every version's optimizers have one of these attributes."""
    optimizer = engine.optimizer
    for owner, name in ((optimizer, "cur_scale"), (optimizer, "loss_scale")):
        value = getattr(owner, name, None)
        if isinstance(value, (int, float)):
            return float(value)
    return None
