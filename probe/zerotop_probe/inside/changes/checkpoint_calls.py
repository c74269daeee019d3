"""Whether steps checkpoint activations: by calls of PyTorch's functions, which set nothing in a model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from zerotop_probe.inside.guard import CostMeter, Guard, is_wrapped, now, on_removal

CHECKPOINTING = "checkpointing"
"""The name of the setting."""

_MODULE = "torch.utils.checkpoint"
# What ``checkpoint`` calls in its module, without and with reentrant autograd. Scripts import ``checkpoint`` itself by name,
# and torch.compile knows it by its identity.
_FUNCTIONS = ("_checkpoint_without_reentrant_generator", "check_backward_validity")
# Steps in a row without a call after which it is off: some loops checkpoint in each n-th step only. Short ones are not all
# followed: then it is the time between two.
_STEPS_WITHOUT = 3


class CheckpointCalls:
    """Follows from step to step whether there are calls. One costs a Python call more, a step without any a comparison."""

    def __init__(self, note_call: Callable[[], None], meter: CostMeter) -> None:
        self._guard = Guard(CHECKPOINTING, meter)
        self._note_call = note_call
        self._has_called = False  # since the last step that was followed
        self._last_ns = 0  # time of the last call
        self._steps_without = 0
        self._is_installed = False
        self.is_on: bool | None = None
        """Whether the last steps checkpointed; None before a whole step was seen."""

    def install_hooks(self) -> None:
        """Wrap PyTorch's functions. Without effect before they are loaded, or in a version that has others."""
        module = sys.modules.get(_MODULE)
        for name in _FUNCTIONS:
            original = getattr(module, name, None)
            if original is not None and not is_wrapped(original):
                setattr(module, name, self._wrap(original))
                self._is_installed = True
                on_removal(functools.partial(setattr, module, name, original))

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call_original(*args: Any, **kwargs: Any) -> Any:
            self._last_ns = now()
            if not self._has_called:
                self._has_called = True
                if self.is_on is False:
                    self._guard.run(self._note_call)
            return original(*args, **kwargs)

        setattr(call_original, "__zerotop__", True)  # noqa: B010 as mypy knows no such attribute
        return call_original

    def end_step(self) -> int | None:
        """Return when checkpointing was switched on or off; None if it was not."""
        if self._has_called:
            self._has_called, self._steps_without = False, 0
            was_on, self.is_on = self.is_on, True
            return self._last_ns if was_on is False else None
        if self.is_on is None:
            self.is_on = False if self._is_installed else None
        elif self.is_on:
            self._steps_without += 1
            if self._steps_without >= _STEPS_WITHOUT:
                self.is_on = False
                return self._last_ns
        return None
