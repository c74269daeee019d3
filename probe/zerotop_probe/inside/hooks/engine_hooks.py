"""Hooks on the engine: construction, forward, backward, step, checkpoints.

Every ``before`` returns the span that its ``after`` ends, or None where the call is not to be recorded.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, NamedTuple

from zerotop_probe.inside import batch_shape
from zerotop_probe.inside.engine_facts import record_engine
from zerotop_probe.inside.engines import Engine
from zerotop_probe.inside.guard import around
from zerotop_probe.inside.hooks import optimizer_step
from zerotop_probe.inside.probe import Probe
from zerotop_probe.inside.recorder import Span
from zerotop_probe.recording.tables import EVAL, FAILED

_SAVES = ("save_checkpoint", "save_16bit_model", "save_fp16_model", "_zero3_consolidated_16bit_state_dict")


class _Stranger(NamedTuple):
    """A call of step() on an engine that was made before we came."""

    engine: Any
    step: int


def _accumulated(engine: Any) -> int:
    """Micro-steps done since the last optimizer step. Under newer accelerate this is wrong, and step() tells."""
    return int(engine.micro_steps) % int(engine.gradient_accumulation_steps())


class Hooks:
    """The hooks of one process on ``DeepSpeedEngine``."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._updates = optimizer_step.Updates(probe)

    def install(self, engine_class: type) -> None:
        """Wraps the methods that this version of DeepSpeed has."""
        meter, updates = self._probe.meter, self._updates
        around(engine_class, "__init__", self._construction_begins, self._construction_ends, meter)
        around(engine_class, "forward", self._forward_begins, self._forward_ends, meter)
        around(engine_class, "backward", self.backward_begins, self.backward_ends, meter)
        around(engine_class, "_backward_prologue", self._direct_begins, self._direct_has_begun, meter)
        around(engine_class, "_backward_epilogue", self._direct_at_end, self._direct_ends, meter)
        around(engine_class, "allreduce_gradients", self._reduce_begins, self.ends, meter)
        around(engine_class, "step", self.step_begins, self.step_ends, meter)
        around(engine_class, "_take_model_step", updates.begins, updates.ends, meter)
        around(engine_class, "train", self._mode_changes, self.ends, meter)
        for name in _SAVES:
            around(engine_class, name, self.phase("checkpoint_save"), self.ends, meter)
        around(engine_class, "load_checkpoint", self.phase("checkpoint_load"), self.ends, meter)

    # --- construction ---------------------------------------------------------------------------------------

    def _construction_begins(self, time_ns: int, engine: Any, args: Any, kwargs: Any) -> tuple[Any, Span] | None:
        if not self._probe.wake() or self._probe.recorder is None or self._probe.recorder.inside("init"):
            return None
        self._go_on(time_ns)
        step = self._probe.engines.place()[1]
        place = (min(self._probe.engines.made, 255), step, 0)
        return engine, self._probe.recorder.begin(time_ns, "init", place)

    def _construction_ends(self, token: tuple[Any, Span], time_ns: int, flags: int, result: Any) -> None:
        engine, span = token
        self.ends(span, time_ns, flags, result)
        if not flags:
            self.adopt(engine)

    def adopt(self, engine: Any) -> None:
        """Takes an engine in that is ready to train, and records its facts."""
        probe = self._probe
        if probe.recorder is None or probe.engines.of(engine) is not None:
            return
        known = probe.engines.add(engine)
        record_engine(probe, known, engine)
        if known.trains or probe.engines.current is None:
            probe.engines.current = known
        if probe.late:
            probe.thread = threading.get_ident()
            known.inventories.add("init")  # that moment is past
        self._updates.open_up(engine, known)
        self._updates.look_at_tensors(known, engine, "init")

    # --- forward and backward -------------------------------------------------------------------------------

    def _forward_begins(self, time_ns: int, engine: Any, args: Any, kwargs: Any) -> Span | None:
        probe, recorder = self._probe, self._probe.recorder
        if recorder is not None and (probe.late or probe.leaving) and not recorder.stack:
            self._between_steps(engine)
            recorder = probe.recorder
        known = probe.engines.of(engine)
        if recorder is None or known is None:
            return None
        trains = engine.module.training and sys.modules["torch"].is_grad_enabled()
        if not self._in_training_thread(trains and known.trains):
            return None
        recorder.settle(time_ns)
        if recorder.inside("forward"):
            return None
        if trains:
            self._go_on(time_ns, known)
        elif known.trains and probe.guess is not None and (probe.guess.open or not recorder.stack):
            probe.guess.forward_begins(time_ns, known.place())
        span = recorder.begin(time_ns, "forward", known.place())
        span.rows, span.sequence, span.tokens = batch_shape.of(args, kwargs)
        recorder.last_forward = span
        span.flags = 0 if trains else EVAL
        return span

    def _between_steps(self, engine: Any, *, stepped: bool = False) -> None:
        """Where a whole step may begin: the place to leave, or to take in an engine that was made before we came."""
        if self._probe.leaving:
            self._probe.leave()
        elif self._probe.engines.of(engine) is None and (stepped or _accumulated(engine) == 0):
            self.adopt(engine)

    def _in_training_thread(self, shows_it: bool) -> bool:
        """Whether the caller's is the thread that trains; what ``shows_it`` tells which one that is now."""
        recorder = self._probe.recorder
        if shows_it and recorder is not None and not recorder.stack:
            self._probe.thread = threading.get_ident()
        return self._probe.in_training_thread()

    def _forward_ends(self, span: Span, time_ns: int, flags: int, result: Any) -> None:
        self.ends(span, time_ns, flags, result)
        if span.flags & EVAL and self._probe.guess is not None:
            self._probe.guess.forward_ended(time_ns)

    def backward_begins(self, time_ns: int, engine: Any, args: Any, kwargs: Any) -> tuple[Engine, Span] | None:
        known = self._enter(time_ns, engine, trains=True)
        if known is None or self._probe.recorder is None or self._probe.recorder.inside("backward"):
            return None
        return known, self._probe.recorder.begin(time_ns, "backward", known.place())

    def backward_ends(self, token: tuple[Engine, Span], time_ns: int, flags: int, result: Any) -> None:
        known, span = token
        self.ends(span, time_ns, flags, result)
        known.backwards += not flags & FAILED

    # ``loss.backward()`` calls no method of the engine. DeepSpeed's own hooks in the graph mark where it
    # begins and ends; on a GPU they run in autograd's thread while the training thread waits.

    def _direct_begins(self, time_ns: int, engine: Any, args: Any, kwargs: Any) -> tuple[Engine, Span] | None:
        recorder, known = self._probe.recorder, self._probe.engines.of(engine)
        if recorder is None or known is None or recorder.inside("backward"):
            return None
        self._go_on(time_ns, known)
        known.direct = recorder.begin(time_ns, "backward", known.place(), loose=True)
        return known, known.direct

    def _direct_has_begun(self, token: tuple[Engine, Span], time_ns: int, flags: int, result: Any) -> None:
        if flags & FAILED:
            self._direct_ends(token, time_ns, flags, result)

    def _direct_at_end(self, time_ns: int, engine: Any, args: Any, kwargs: Any) -> tuple[Engine, Span] | None:
        known = self._probe.engines.of(engine)
        return (known, known.direct) if known is not None and known.direct is not None else None

    def _direct_ends(self, token: tuple[Engine, Span], time_ns: int, flags: int, result: Any) -> None:
        known, span = token
        known.direct = None
        self.backward_ends((known, span), time_ns, flags, result)

    def _reduce_begins(self, time_ns: int, engine: Any, args: Any, kwargs: Any) -> Span | None:
        recorder, known = self._probe.recorder, self._probe.engines.of(engine)
        if recorder is None or known is None or recorder.inside("reduce"):
            return None
        # Outside of a backward it finishes the micro-step before, as in a pipeline.
        within = recorder.inside("backward") is not None
        return recorder.begin(time_ns, "reduce", known.place(after_backward=not within), brief=within)

    # --- step -----------------------------------------------------------------------------------------------

    def step_begins(self, time_ns: int, engine: Any, args: Any, kwargs: Any) -> Span | _Stranger | None:
        """A call of step(), which updates only at a gradient-accumulation boundary."""
        if self._probe.late and self._probe.engines.of(engine) is None:
            return _Stranger(engine, engine.global_steps)
        known = self._enter(time_ns, engine, trains=True)
        if known is None or self._probe.recorder is None or self._probe.recorder.inside("step"):
            return None
        # Between two updates such a call does nothing; the update itself confirms it.
        return self._probe.recorder.expect(time_ns, "step", known.place(after_backward=True))

    def step_ends(self, span: Span | _Stranger, time_ns: int, flags: int, result: Any) -> None:
        """The end of such a call; an optimizer step also records what the probe has cost."""
        if isinstance(span, _Stranger):
            if span.engine.global_steps > span.step:
                self._between_steps(span.engine, stepped=True)
            return
        self.ends(span, time_ns, flags, result)
        self._updates.step_ended(span, time_ns)
        if self._probe.leaving and self._probe.recorder is not None and not self._probe.recorder.stack:
            self._probe.leave()

    # --- what they share ------------------------------------------------------------------------------------

    def phase(self, phase: str) -> Any:
        def begins(time_ns: int, engine: Any, args: Any, kwargs: Any) -> Span | None:
            known, recorder = self._enter(time_ns, engine), self._probe.recorder
            if known is None or recorder is None or recorder.inside(phase):
                return None
            return recorder.begin(time_ns, phase, known.place())

        return begins

    def _mode_changes(self, time_ns: int, engine: Any, args: Any, kwargs: Any) -> None:
        """``engine.train()`` ends an evaluation of the user's own."""
        mode = kwargs.get("mode", args[0] if args else True)
        if mode and self._probe.engines.of(engine) is not None and self._probe.in_training_thread():
            self._go_on(time_ns)

    def _enter(self, time_ns: int, engine: Any, *, trains: bool = False) -> Engine | None:
        """What is known of the engine of a call in the training thread."""
        known = self._probe.engines.of(engine)
        if known is None or self._probe.recorder is None or not self._in_training_thread(trains):
            return None
        self._go_on(time_ns, known)
        return known

    def _go_on(self, time_ns: int, known: Engine | None = None) -> None:
        """Something begins that is no evaluation, and that an abandoned backward is not the place of."""
        if self._probe.recorder is not None:
            self._probe.recorder.settle(time_ns)
        if self._probe.guess is not None:
            self._probe.guess.close()
        if known is not None and known.trains:
            self._probe.engines.current = known

    def ends(self, span: Span, time_ns: int, flags: int, result: Any) -> None:
        if self._probe.recorder is not None:
            self._probe.recorder.end(span, time_ns, flags)
