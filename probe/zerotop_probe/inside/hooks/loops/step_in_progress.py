"""A step of an optimizer in progress, and whether it is: an exception may have ended it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from zerotop_probe.inside.span import Span


class StepInProgress:
    """A step in progress."""

    __slots__ = (
        "backwards",
        "begin_ns",
        "can_find_calls",
        "depth",
        "found_inf",
        "has_closure",
        "is_scaled",
        "owner",
        "span",
        "was_called",
    )

    def __init__(self, optimizer: Any, *, is_scaled: bool = False, has_closure: bool = False) -> None:
        self.owner = id(optimizer)
        self.begin_ns = 0  # of one in a counted step
        self.backwards = 0  # likewise: those before it
        self.span: Span | None = None
        self.is_scaled = is_scaled
        self.has_closure = has_closure
        self.depth = 0  # calls in progress: step() of a subclass that calls that of its base class is seen twice
        self.was_called = False  # of a scaled step: whether the scaler has called the optimizer
        self.found_inf: bool | None = False  # likewise, of a fused optimizer; None where reading it would wait for the GPU
        self.can_find_calls = has_closure and count_calls(self.owner) > 0

    def was_left(self, calls: int) -> bool:
        """Return whether an exception has ended this step, which has a closure, if ``calls`` new ones are in progress.

        PyTorch does not report that to its hooks. Calls by the closure look the same as calls after the exception, except
        for the number of calls in progress.
        """
        return self.can_find_calls and count_calls(self.owner) < self.depth + calls


def count_calls(optimizer: int) -> int:
    """Return how many calls of the step() of an optimizer, by id(), are in progress in this thread."""
    calls = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # PyTorch wraps each class's step() in this function, which calls the hooks.
        if frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == "torch.optim.optimizer":
            calls += id(frame.f_locals.get("self")) == optimizer
        frame = frame.f_back
    return calls
