"""Parameters that are trained although no optimizer holds them any more, as those of a model made anew beside its optimizer.

Counted only where an optimizer held each parameter of each model before: some designs leave a part to no optimizer. A part
that loses its optimizer while nothing takes its place, or a model that joins with parameters of its own, is meant to be so.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from zerotop_probe.inside.changes.training_settings import list_submodules
from zerotop_probe.inside.stacks.own_lines import OwnLines, OwnPlace
from zerotop_probe.recording.event_values import OBJECTS

# Steps for which they must be in no optimizer: some scripts add them to one a little later.
_STEPS = 10
# The most parameters that are noted until a look finds each in an optimizer: for each one its line is searched.
_MOST_NOTED = 512


class RegisteredParameters:
    """Parameters that modules were given since a look last found each parameter in an optimizer, with the lines."""

    def __init__(self, own_lines: OwnLines) -> None:
        self._own_lines = own_lines
        self._noted: list[tuple[weakref.ref[Any], int, OwnPlace | None]] = []
        self.is_fresh = False
        """Whether there is one since the last look."""

    def note(self, time_ns: int, parameter: Any) -> None:
        """Note a parameter, with the line that gives it to its module, or makes the module."""
        if parameter is not None and len(self._noted) < _MOST_NOTED:
            self._noted.append((weakref.ref(parameter), time_ns, self._find_place()))
            self.is_fresh = True

    def _find_place(self) -> OwnPlace | None:
        places = list(self._own_lines.list_places(sys._getframe()))
        makers = (one for one in places if one.function.rpartition(".")[2] != "__init__")
        return next(makers, places[0] if places else None)

    def find_first(self, numbers: set[int]) -> tuple[int | None, OwnPlace | None]:
        """Return when and where the first of some parameters, by id, was given to its module; None if unknown."""
        for reference, time_ns, place in self._noted:
            parameter = reference()
            if parameter is not None and id(parameter) in numbers:
                return time_ns, place
        return None, None

    def clear(self) -> None:
        """Forget all."""
        self._noted.clear()


class _Held(NamedTuple):
    """What optimizers held at a look at which each parameter of each model was among it."""

    numbers: set[int]  # ids of tensors
    frozen: set[int]  # ids of parameters that were not trained
    unused: int  # of these, in no model and without a gradient; all if none has one
    models: list[weakref.ref[Any]]


class UnoptimizedParameters:
    """Counts the parameters that are trained and in no optimizer, at the looks of one rank."""

    def __init__(self, registered: RegisteredParameters) -> None:
        self._registered = registered
        self._held: _Held | None = None
        self.held_ns = 0
        """When an optimizer held each the last time."""
        self._found_step: int | None = None
        self._counts: dict[str, int] = {}
        self._numbers: set[int] = set()

    @property
    def may_be_new(self) -> bool:
        """Whether a module was given a parameter since the last look."""
        return self._registered.is_fresh and self._held is not None

    def is_due(self, step: int) -> bool:
        """Whether a look would show whether those that were seen stay so."""
        return self._found_step is not None and not self._counts and step >= self._found_step + _STEPS

    def count(self, models: list[Any], optimizers: Iterable[Any], time_ns: int, step: int) -> dict[str, int]:
        """Return how many there are for some steps already.

        ``tensors`` and their ``elements``; ``dropped`` and ``unfrozen``: tensors of these that an optimizer held before, or
        that were not trained; ``left``: tensors that optimizers still hold, in no model that is in use.
        """
        held = {id(one): one for optimizer in optimizers for one in _list_optimized(optimizer)}
        own = _list_parameters(models)
        is_any_trained = any(_is_trained(one) for one in held.values())
        outside = held.keys() - own.keys() if is_any_trained else held.keys()
        left = sum(_is_unused(held[number]) for number in outside)
        self._registered.is_fresh = False
        if not any(one.requires_grad and number not in held for number, one in own.items()):
            frozen = {number for number, one in own.items() if not one.requires_grad}
            self._held, self.held_ns = _Held(set(held), frozen, left, [weakref.ref(one) for one in models]), time_ns
            self._found_step, self._counts = None, {}
            self._registered.clear()
            return {}
        if self._counts or self._held is None:
            return self._counts
        if left <= self._held.unused:
            known = [one for one in models if any(model() is one for model in self._held.models)]
            own = _list_parameters(known) if len(held) >= len(self._held.numbers) else {}
        found = {number: one for number, one in own.items() if number not in held and _is_trained(one)}
        if not found:
            self._found_step = None
        elif self._found_step is None:
            self._found_step = step
        elif step >= self._found_step + _STEPS:
            self._counts = {"tensors": len(found), "elements": sum(one.numel() for one in found.values())}
            self._counts["left"] = left - self._held.unused
            self._counts["dropped"] = len(found.keys() & self._held.numbers)
            self._counts["unfrozen"] = len(found.keys() & self._held.frozen - self._held.numbers)
            self._numbers = set(found)
        return self._counts

    @property
    def changed_setting(self) -> str:
        """The setting that was changed if all of those counted are older; empty if any is new."""
        count = len(self._numbers)
        settings = {OBJECTS: self._counts.get("dropped"), "trained_parameters": self._counts.get("unfrozen")}
        return next((name for name, older in settings.items() if older == count), "")

    def find_place(self) -> tuple[int | None, OwnPlace | None]:
        """Return when and where the first of the counted parameters was made; None for what is unknown."""
        return self._registered.find_first(self._numbers)


def _list_optimized(optimizer: Any) -> list[Any]:
    return [one for group in getattr(optimizer, "param_groups", ()) for one in group["params"]]


def _list_parameters(models: list[Any]) -> dict[int, Any]:
    own = (one for module in list_submodules(models) for one in module._parameters.values() if one is not None)
    return {id(one): one for one in own}


def _is_plain(parameter: Any) -> bool:
    """Return whether reading its gradient runs no code of a subclass."""
    return type(parameter) is sys.modules["torch"].nn.Parameter


def _is_trained(parameter: Any) -> bool:
    return _is_plain(parameter) and parameter.requires_grad and parameter.is_leaf and parameter.grad is not None


def _is_unused(parameter: Any) -> bool:
    return _is_plain(parameter) and parameter.requires_grad and parameter.is_leaf and parameter.grad is None
