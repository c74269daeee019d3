"""Decides which steps of a loop's optimizers end its iterations, even if steps were only counted."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from zerotop_probe.inside.guard import now
from zerotop_probe.inside.hooks.loops.iteration_rule import IterationRule
from zerotop_probe.inside.hooks.loops.loop import Loop
from zerotop_probe.recording import events


class IterationCounter:
    """The iteration rule, applied to the optimizers of one loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.rule = IterationRule()
        self._counting = loop.probe.counting
        self._replays = loop.probe.graph_replays
        self._seen_replays = 0
        self._reported_counting: set[int] = set()
        # The optimizer that was the only one when its step was counted last, its number, and how many there had been.
        self._only: Callable[[], Any] = lambda: None
        self._only_number = self._known_optimizers = 0
        self.has_scalers = False
        """Whether a loss scaler may skip updates."""

    def finish_step(self, optimizer: Any) -> bool:
        """Count a step of an optimizer, and return whether it ends an iteration."""
        if self._counting.backwards:
            self.take_counts()
        if self._replays.count != self._seen_replays:  # a graph that was replayed may hold the backward
            self._seen_replays = self._replays.count
            self.rule.expect_update(self._only_number)
        # Nearly all loops have one optimizer.
        if self._only() is optimizer and self._known_optimizers == self._loop.optimizer_count:
            return self.rule.finish_step(self._only_number, self._loop.backward_total)
        ends_iteration = self._count_step(optimizer)
        if self.rule.counting != self._reported_counting and len(self._loop.list_optimizers()) > 1:
            self.record_optimizers()
        return ends_iteration

    def _count_step(self, optimizer: Any) -> bool:
        number = self._loop.find_number(optimizer)
        alive = self._loop.list_optimizers()
        self._counting.optimizer = id(optimizer) if len(alive) == 1 and not self.has_scalers else 0
        if len(alive) == 1:
            self._only, self._only_number = weakref.ref(optimizer), number
            self._known_optimizers = self._loop.optimizer_count
        if alive.keys() != self.rule.step_counts.keys():
            # One without parameters changes nothing: its steps are part of other iterations, if there are any.
            useful = {n for n, o in alive.items() if any(group["params"] for group in o.param_groups)} or alive.keys()
            for gone in self.rule.step_counts.keys() - useful:
                self.rule.remove(gone)
            for other in useful - self.rule.step_counts.keys():
                self.rule.add(other)
            if number not in useful:
                return False
        if number not in self.rule.counting:
            own = _list_parameters(optimizer)
            for other in self.rule.counting & alive.keys():
                theirs = _list_parameters(alive[other])
                if own <= theirs or theirs <= own:
                    self.rule.replace(number, other, self._loop.backward_total)
        return self.rule.finish_step(number, self._loop.backward_total)

    def take_counts(self) -> None:
        """Add the updates and backwards of counted steps."""
        counting, loop = self._counting, self._loop
        if counting.updates:
            seen = loop.backward_total + counting.seen_backwards
            self.rule.add_steps(self._only_number, counting.updates, seen)
        loop.backward_total += counting.backwards
        counting.updates = counting.backwards = counting.seen_backwards = 0

    def record_optimizers(self) -> None:
        """Record the ``optimizers`` event: all optimizers, and those whose steps make an iteration."""
        recorder = self._loop.probe.recorder
        if recorder is None:
            return
        counting = self._reported_counting = set(self.rule.counting)
        optimizers = [
            {
                "number": number,
                "class": type(optimizer).__name__,
                "parameters": sum(p.numel() for group in optimizer.param_groups for p in group["params"]),
                "steps": self.rule.step_counts.get(number, 0),
                "counts": number in counting,
            }
            for number, optimizer in self._loop.list_optimizers().items()
        ]
        engine, step, _ = self._loop.get_position()
        recorder.write_event(now(), events.Optimizers, engine=engine, step=step, optimizers=optimizers)


def _list_parameters(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
