"""A model that is trained without the DistributedDataParallel that wraps it, so that no gradients are reduced over ranks."""

from __future__ import annotations

import weakref
from typing import Any

from zerotop_probe.inside.guard import now

# Steps in a row, of those with phases, in which DDP is not called.
_STEPS = 10
REDUCES = "require_backward_grad_sync"
"""An attribute that only DDP has: whether its next forward has gradients reduced; False within no_sync()."""


class BypassedDdp:
    """Follows the forwards of the steps whose phases are recorded."""

    def __init__(self) -> None:
        self._model: weakref.ref[Any] | None = None  # within the DDP that was called last
        self._steps = 0  # without it, in a row
        self.last_ns = 0
        """When DDP was called last."""
        self.first_ns = 0
        """When the model was first called without it since then."""

    @property
    def is_lasting(self) -> bool:
        """Whether in the last steps the model was called without DDP."""
        return self._steps > _STEPS

    def note(self, module: Any, *, is_first: bool) -> bool:
        """Note a forward of a model in training; ``is_first``: the first one of its step. Returns whether it is a DDP."""
        if REDUCES in (facts := vars(module)):
            model = facts["_modules"].get("module")
            self._model = weakref.ref(model) if model is not None else None
            self._steps, self.last_ns = 0, now()
            return True
        if is_first and self._model is not None and self._model() is module:
            self._steps += 1
            self.first_ns = now() if self._steps == 1 else self.first_ns
        return False
