"""The loop that trains in one process: its models, its optimizers, and the begin of its recording."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from zerotop_probe.inside.engines import LoopState
from zerotop_probe.inside.facts.loop_facts import find_device, record_loop, record_loop_tensors
from zerotop_probe.inside.guard import AfterHook, BeforeHook, Guard, now
from zerotop_probe.inside.hooks.loops.root_finder import RootFinder
from zerotop_probe.inside.hooks.training_hooks import TrainingHooks
from zerotop_probe.inside.logged_values import OptimizerRate
from zerotop_probe.inside.probe import Probe, find_ordinal
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.inside.span import Span
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import SKIPPED

# After this many iterations all models of a loop have been called, and the search for others ends.
_ARMED_ITERATIONS = 2
# A compiled function calls no module. After this many backwards without a forward the search ends.
_MAX_SEARCHES = 3
# Of the inventories that are taken again and again until they are recorded.
_MOMENTS = ("before_backward", "before_update", "after_update")


class Loop(TrainingHooks):
    """The loop of one process, unless a DeepSpeed engine does its training."""

    def __init__(self, probe: Probe, before_forward: BeforeHook, after_forward: AfterHook) -> None:
        super().__init__(probe)
        self.probe = probe
        self.finder = RootFinder(before_forward, after_forward, probe.meter, probe.counting)
        self.backward_total = 0
        self._optimizers: dict[int, weakref.ref[Any]] = {}
        self.optimizer_count = 0
        """Optimizers so far, those that are gone included."""
        self._ownership: dict[int, bool] = {}  # of the modules asked about, by id(), since the last new optimizer
        self._searches = 0
        self._armed_until = 0
        self.settled: LoopState | None = None
        """The state of a loop whose facts are all recorded, so that only its steps are left; None before."""
        self.can_count = True
        """Whether its hooks can do without the phases of a step."""
        self._expects_tensors = False
        self._has_facts = False
        self._saw_update = False  # since the probe entered this process
        self._output: dict[str, Any] = {}  # facts of the last training forward's result
        self._guard = Guard("loop facts", probe.meter)

    # --- optimizers -----------------------------------------------------------------------------------------

    def add_optimizer(self, optimizer: Any) -> int:
        """Add an optimizer, and search the models that it trains; return its number."""
        self.probe.counting.stop()
        self.probe.counting.optimizer = 0
        number = self.optimizer_count
        self.optimizer_count += 1
        self._optimizers = {other: reference for other, reference in self._optimizers.items() if reference() is not None}
        self._optimizers[number] = weakref.ref(optimizer)
        self._ownership.clear()
        self._searches = 0
        self.search_roots()
        return number

    def find_number(self, optimizer: Any) -> int:
        """Return the number of an optimizer; it is new if it was copied or unpickled."""
        for number, reference in self._optimizers.items():
            if reference() is optimizer:
                return number
        return self.add_optimizer(optimizer)

    def list_optimizers(self) -> dict[int, Any]:
        """Return the optimizers that are alive, by number."""
        return {number: found for number, reference in self._optimizers.items() if (found := reference()) is not None}

    def owns_parameters(self, module: Any) -> bool:
        """Return whether an optimizer updates a parameter of this module."""
        known = self._ownership.get(id(module))
        if known is None:
            found = self.list_optimizers().values()
            owned = {id(p) for optimizer in found for group in optimizer.param_groups for p in group["params"]}
            known = any(id(parameter) in owned for parameter in module.parameters())
            self._ownership[id(module)] = known
        return known

    def is_trained(self, module: Any) -> bool:
        """Return whether a module belongs to this loop, so that its forwards are recorded."""
        is_recorded = self.probe.recorder is not None and not self.probe.engines.belongs_to_deepspeed
        return is_recorded and self.owns_parameters(module)

    # --- the begin of a recording ---------------------------------------------------------------------------

    def find_recorder(self, *, adopt: bool = False) -> Recorder | None:
        """Return the recorder while the loop is recorded, else None; ``adopt``: begin now if nothing speaks against it."""
        engines = self.probe.engines
        if engines.belongs_to_deepspeed:
            return None
        if engines.loop is None and not (adopt and self._begin_recording()):
            return None
        return self.probe.recorder

    def begin_late(self) -> None:
        """Begin with the first whole iteration: this process may train already."""
        self._saw_update = False

    def note_update(self, optimizer: Any) -> None:
        """Note an optimizer's step: even in a loop that is older than the probe a whole iteration follows it."""
        if self.probe.entered_late and self.probe.engines.loop is None and not self.probe.engines.belongs_to_deepspeed:
            is_first, self._saw_update = not self._saw_update, True
            self.find_number(optimizer)
            if is_first:
                self._searches = 0
                self.search_roots()

    def _begin_recording(self) -> bool:
        is_late = self.probe.entered_late
        if (is_late and not self._saw_update) or not self.probe.start_recording():
            return False
        state = self.probe.engines.add_loop()
        if is_late:
            state.recorded_inventories.add("init")  # that moment is past
        self.settled = None
        self._has_facts = self._expects_tensors = False
        self._armed_until = _ARMED_ITERATIONS
        recorder, planned = self.probe.recorder, self.probe.library.planned_steps
        watch = self.probe.watch
        watch.list_parts, watch.count_tensors, watch.record_facts = self._list_parts, self._count_again, self._record_again
        watch.find_joined = lambda: self.finder.joined_ns
        self._guard.run_once(self._watch_device)
        if planned and recorder is not None:
            recorder.write_event(now(), events.TotalSteps, steps=planned, source="trainer")
        if recorder is not None and self.probe.is_first_rank:
            recorder.followers.append(OptimizerRate(self.list_optimizers, recorder.logged, self.probe.meter))
        return True

    def _watch_device(self) -> None:
        self.probe.watch_device(find_ordinal(find_device(self.finder.list_modules(), self.list_optimizers().values())))

    def record_facts(self, *, at_update: bool) -> None:
        """Record the loop's facts, once: as soon as its only optimizer's model is known, else ``at_update``, the first."""
        state = self.probe.engines.loop
        if self._has_facts or state is None:
            return
        modules, optimizers = self.finder.list_modules(), list(self.list_optimizers().values())
        if not at_update:
            parameters = {id(parameter) for module in modules for parameter in module.parameters()}
            own = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
            if len(optimizers) != 1 or not parameters.issuperset(own):
                return
        self._guard.run_once(functools.partial(self._record, at_update=at_update), state, modules, optimizers)
        self._has_facts = True
        if not at_update:
            self.count_tensors("init")

    def _record(self, state: LoopState, modules: list[Any], optimizers: list[Any], *, at_update: bool) -> None:
        """Record the facts. No autocast is in effect ``at_update``, where that of the last forward counts."""
        library = self.probe.library.find_mixed_precision()
        known = {"autocast": library or self.probe.watch.autocast or None} if at_update else {}
        record_loop(self.probe, state, modules, optimizers, **known)

    def count_tensors(self, when: str, **more: Any) -> None:
        """Record the tensor inventory, the first time at each ``when``, with ``more`` facts."""
        state = self.probe.engines.loop
        if state is not None and when not in state.recorded_inventories:
            modules, optimizers = self.finder.list_modules(), list(self.list_optimizers().values())
            self._guard.run_once(
                functools.partial(record_loop_tensors, **more), self.probe, state, modules, optimizers, when
            )

    def _list_parts(self) -> tuple[list[Any], list[Any]]:
        """Return the models, and the optimizers without those that a newer one of the same parameters has replaced."""
        modules = self.finder.list_modules()
        if not modules:
            return [], []  # looked for in each step until there is one
        updated: set[int] = set()
        current = []
        for optimizer in reversed(self.list_optimizers().values()):
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if not own <= updated:
                current.append(optimizer)
            updated |= own
        return modules, current[::-1]

    def _count_again(self, when: str, step: int) -> None:
        if self._has_facts and (state := self.probe.engines.loop) is not None:
            optimizers = list(self.list_optimizers().values())  # a replaced one may keep its state
            record_loop_tensors(self.probe, state, self.finder.list_modules(), optimizers, when, step)

    def _record_again(self) -> None:
        if self._has_facts and (state := self.probe.engines.loop) is not None:
            self._record(state, *self._list_parts(), at_update=True)

    # --- iterations -----------------------------------------------------------------------------------------

    def get_position(self, *, after_backward: bool = False) -> tuple[int, int, int]:
        """Return (engine, step, micro-step) of a phase that begins now."""
        state = self.probe.engines.loop
        return state.get_position(after_backward=after_backward) if state is not None else (0, 0, 0)

    def prepare_forward(self) -> None:
        """Before a training forward: count tensors if the gradients of the last update may have been freed since then."""
        if self._expects_tensors:
            self._expects_tensors = False
            self.count_tensors("next_forward")

    def note_output(self, output: Any) -> None:
        """Remember the output of a model in a training forward, until a backward has been recorded."""
        state = self.probe.engines.loop
        if state is not None and "before_backward" not in state.recorded_inventories:
            self._guard.run(self._read_output, output)

    def _read_output(self, output: Any) -> None:
        logits = getattr(output, "logits", output)
        if hasattr(logits, "element_size") and logits.dim() > 1:
            self._output = {"output_shape": list(logits.shape), "output_item_bytes": logits.element_size()}

    def prepare_backward(self) -> None:
        """Take the inventory before a backward, while all that the forward has saved is alive."""
        self.count_tensors("before_backward", **self._output)

    def prepare_update(self) -> None:
        """Before a step of an optimizer."""
        self.record_facts(at_update=True)
        self.count_tensors("before_update")

    def finish_iteration(self, recorder: Recorder, span: Span, time_ns: int) -> None:
        """After the step that ended an iteration, and was counted."""
        state: LoopState | None = self.probe.engines.loop
        if state is None:
            return
        can_count = self.can_count and self.settled is state and not self.probe.leaving
        recorder.end_step(span, time_ns, state, can_count=can_count)
        if not span.flags & SKIPPED and "after_update" not in state.recorded_inventories:
            self.count_tensors("after_update")
            self._expects_tensors = True
        if self.settled is None:
            self._settle(state)
        if self.probe.leaving and not recorder.stack:
            self.probe.leave_process()

    def _settle(self, state: LoopState) -> None:
        if state.finished_steps >= self._armed_until:
            self.finder.disarm()
            if self._has_facts and not self._expects_tensors and state.recorded_inventories.issuperset(_MOMENTS):
                self.settled = state

    def retire(self) -> None:
        """Leave this process to the hooks on DeepSpeed's engines."""
        self.settled = None
        self.finder.remove_hooks()
        if self.probe.recorder is not None:
            self.probe.recorder.write_all_spans()

    def search_roots(self) -> None:
        """Watch all modules during the next iterations, to find a model that is missing or new.

        Not before the first update that a late probe sees: in the forward that it was entered in, layers would be roots.
        """
        if self.probe.entered_late and not self._saw_update:
            return
        if self._searches < _MAX_SEARCHES:
            self._searches += 1
            state = self.probe.engines.loop
            self._armed_until = (state.finished_steps if state is not None else 0) + _ARMED_ITERATIONS
            self.settled = None
            self.finder.arm()
