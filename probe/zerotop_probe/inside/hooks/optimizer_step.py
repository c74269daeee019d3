"""The inside of an optimizer step: which part of it computes, which moves data, and whether it was skipped.

DeepSpeed brackets the parts with timers of its own that do nothing unless its wall-clock breakdown is on;
ours stand in for them. The inner optimizer is seen through torch's hooks for all optimizers.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

from zerotop_probe.inside.engine_facts import record_tensors
from zerotop_probe.inside.engines import Engine
from zerotop_probe.inside.guard import Part, around, now, on_removal
from zerotop_probe.inside.hooks.timer_proxy import Timers
from zerotop_probe.inside.probe import Probe
from zerotop_probe.inside.recorder import Span
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import BOUNDARY, SKIPPED

# Stage 3's name for copying what the optimizer made to where the parameters are used.
_REASSIGN = "_reassign_or_swap_out_partitioned_parameters"


class _Update(NamedTuple):
    """What was so before an update."""

    known: Engine
    engine: Any
    span: Span | None
    step: int
    skipped_steps: int
    loss_scale: float | None


class Updates:
    """Hooks on what happens within ``step()`` of the engines of one process."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._now: _Update | None = None
        self._inner: Span | None = None
        self._moving: Span | None = None
        self._moves_after_inner = False
        self._listening = False
        self._hook = Part("optimizer hooks", probe.meter)
        self._tensors = Part("tensors", probe.meter)

    # --- the update as a whole ------------------------------------------------------------------------------

    def begins(self, time_ns: int, engine: Any, args: Any, kwargs: Any) -> _Update | None:
        """DeepSpeed calls ``_take_model_step`` only at a gradient-accumulation boundary, in every version."""
        recorder, known = self._probe.recorder, self._probe.engines.of(engine)
        if recorder is None or known is None:
            return None
        span = recorder.inside("step")
        if span is not None:
            span.flags |= BOUNDARY
            recorder.confirm(span, time_ns)
        self.look_at_tensors(known, engine, "before_update")
        scale = loss_scale(engine) if known.loss_scaled else None
        self._now = _Update(known, engine, span, engine.global_steps, engine.skipped_steps, scale)
        return self._now

    def ends(self, update: _Update, time_ns: int, flags: int, result: Any) -> None:
        """Counts anew, and says if the gradients overflowed."""
        self._now = self._inner = self._moving = None
        self._moves_after_inner = False
        if flags:
            return
        update.known.backwards = 0
        if update.engine.skipped_steps <= update.skipped_steps:
            self.look_at_tensors(update.known, update.engine, "after_update")
            return
        if update.span is not None:
            update.span.flags |= SKIPPED
        if self._probe.recorder is not None:
            after = loss_scale(update.engine)
            facts = {
                "engine": update.known.index,
                "loss_scale_before": update.loss_scale,
                "loss_scale_after": after,
            }
            self._probe.recorder.event(time_ns, events.OVERFLOW, step=update.step, **facts)

    def look_at_tensors(self, known: Engine, engine: Any, when: str) -> None:
        """Records whose the bytes are, the first time that it is ``when``."""
        if when not in known.inventories:
            self._tensors.run(record_tensors, self._probe, known, engine, when)

    def step_ended(self, span: Span, time_ns: int) -> None:
        """After the span of a step has been written."""
        if span.flags & BOUNDARY and self._probe.recorder is not None:
            self._probe.recorder.step_ended(span, time_ns)

    # --- its parts ------------------------------------------------------------------------------------------

    def open_up(self, engine: Any, known: Engine) -> None:
        """Makes the parts of this engine's updates visible."""
        self._listen_to_optimizers()
        optimizer = engine.optimizer
        timers = getattr(optimizer, "timers", None)
        if timers is not None:
            optimizer.timers = Timers(timers, self._watchers(optimizer, known), self._probe.meter)
            on_removal(functools.partial(_give_back_timers, weakref.ref(optimizer), timers))
        meter, kind = self._probe.meter, type(optimizer)
        if kind.__name__ == "BF16_Optimizer":
            around(kind, "update_lp_params", self._part_begins("allgather"), self._part_ends, meter)
        if known.offloads_optimizer:
            around(kind, "_wait_for_offload_copies", self._wait_begins, self._part_ends, meter)
            around(kind, _REASSIGN, self._move_begins, self._part_ends, meter)

    def _wait_begins(self, time_ns: int, optimizer: Any, args: Any, kwargs: Any) -> Span | None:
        return self._begin(time_ns, optimizer, "grads_to_cpu") if optimizer._pending_offload_events else None

    def _move_begins(self, time_ns: int, optimizer: Any, args: Any, kwargs: Any) -> Span | None:
        known = self._now.known if self._now is not None else None
        moves = known is not None and known.offloads_optimizer and not known.offloads_parameters
        return self._begin(time_ns, optimizer, "params_to_gpu") if moves else None

    def _part_begins(self, phase: str) -> Any:
        return lambda time_ns, optimizer, args, kwargs: self._begin(time_ns, optimizer, phase)

    def _begin(self, time_ns: int, optimizer: Any, phase: str, *, loose: bool = False) -> Span | None:
        """Begins a part of the update in progress, if it is this optimizer's."""
        update, recorder = self._now, self._probe.recorder
        if update is None or recorder is None or update.engine.optimizer is not optimizer:
            return None
        place = update.known.place(after_backward=True)
        return recorder.begin(time_ns, phase, place, loose=loose, brief=not update.known.offloads_optimizer)

    def _part_ends(self, span: Span, time_ns: int, flags: int, result: Any) -> None:
        if self._probe.recorder is not None:
            self._probe.recorder.end(span, time_ns, flags)

    def _watchers(self, optimizer: Any, known: Engine) -> dict[str, tuple[Any, Any]]:
        """By DeepSpeed's name of a timer: what to do when it starts and stops."""
        watchers = {"optimizer_allgather": self._timed(optimizer, "allgather")}
        if known.offloads_optimizer:
            # Under offload these are the gradients' last touch on the CPU before the optimizer: unscaling and
            # clipping.
            watchers["optimizer_gradients"] = self._timed(optimizer, "grads_to_cpu")
            if not hasattr(optimizer, _REASSIGN):
                watchers["optimizer_step"] = (self._copying_may_follow, self._copying_ends)
        return watchers

    def _timed(self, optimizer: Any, phase: str) -> tuple[Any, Any]:
        spans: list[Span] = []

        def starts() -> None:
            # After an overflow DeepSpeed starts and stops all its timers with nothing in between.
            overflow = getattr(optimizer, "overflow", False)
            span = None if overflow else self._begin(now(), optimizer, phase, loose=True)
            if span is not None:
                spans.append(span)

        def stops() -> None:
            if spans:
                self._part_ends(spans.pop(), now(), 0, None)

        return starts, stops

    # --- the inner optimizer, and the copy of what it made that follows -------------------------------------

    def _copying_may_follow(self) -> None:
        self._moves_after_inner = True

    def _copying_ends(self) -> None:
        self._moves_after_inner = False
        moving, self._moving = self._moving, None
        if moving is not None:
            self._part_ends(moving, now(), 0, None)

    def _listen_to_optimizers(self) -> None:
        if self._listening:
            return
        self._listening = True
        from torch.optim import optimizer as torch_optimizer

        register_before = getattr(torch_optimizer, "register_optimizer_step_pre_hook", None)
        register_after = getattr(torch_optimizer, "register_optimizer_step_post_hook", None)
        if register_before is not None and register_after is not None:
            handles = register_before(self._before_inner), register_after(self._after_inner)
            on_removal(lambda: self._stop_listening(handles))

    def _stop_listening(self, handles: tuple[Any, Any]) -> None:
        self._listening = False
        for handle in handles:
            handle.remove()

    def _before_inner(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._now is not None:
            self._hook.run(self._inner_begins, optimizer, self._now)

    def _inner_begins(self, optimizer: Any, update: _Update) -> None:
        recorder = self._probe.recorder
        if recorder is None or self._inner is not None or not self._probe.in_training_thread():
            return
        known = update.known
        name = known.inner_phases.get(id(optimizer))
        if name is None:
            name = "cpu_optimizer" if on_cpu(optimizer, known, update.engine) else "optimizer"
            known.inner_phases[id(optimizer)] = name
        place = known.place(after_backward=True)
        self._inner = recorder.begin(now(), name, place, loose=True, brief=not known.offloads_optimizer)

    def _after_inner(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._inner is not None:
            self._hook.run(self._inner_ends)

    def _inner_ends(self) -> None:
        time_ns = now()
        inner, self._inner = self._inner, None
        if inner is None:
            return
        self._part_ends(inner, time_ns, 0, None)
        if self._moves_after_inner and self._now is not None and self._probe.recorder is not None:
            place = self._now.known.place(after_backward=True)
            self._moving = self._probe.recorder.begin(time_ns, "params_to_gpu", place, loose=True)


def _give_back_timers(reference: weakref.ref[Any], timers: Any) -> None:
    optimizer = reference()
    if optimizer is not None and isinstance(optimizer.timers, Timers):
        optimizer.timers = timers


def on_cpu(optimizer: Any, known: Engine, engine: Any) -> bool:
    """Whether this inner optimizer computes on the CPU for want of room elsewhere."""
    if type(optimizer).__name__.startswith("DeepSpeedCPU"):
        return True
    if not known.offloads_optimizer and getattr(engine.device, "type", "cpu") == "cpu":
        return False
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    first = next(parameters, None)
    return first is not None and first.device.type == "cpu"


def loss_scale(engine: Any) -> float | None:
    """The loss scale in force, or None. Optimizers of all versions have it under one of these names."""
    optimizer = engine.optimizer
    for owner, name in ((optimizer, "cur_scale"), (optimizer, "loss_scale")):
        value = getattr(owner, name, None)
        if isinstance(value, (int, float)):
            return float(value)
    return None
