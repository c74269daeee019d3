"""A phase in progress."""

from __future__ import annotations

from typing import Any

from zerotop_probe.inside.inspection import batch_shape
from zerotop_probe.recording.tables import UNKNOWN


class Span:
    """A phase in progress. ``loose``: it does not end with a function's return, so an exception can leave it open."""

    __slots__ = (
        "batch",
        "begin_mark",
        "begin_ns",
        "depth",
        "end_ns",
        "engine",
        "flags",
        "is_brief",
        "is_confirmed",
        "is_quick",
        "loose",
        "micro_step",
        "phase",
        "rows",
        "samples_device",
        "sequence",
        "step",
        "tokens",
    )

    def __init__(self, begin_ns: int, phase: int, depth: int, position: tuple[int, int, int], loose: bool) -> None:
        """``position`` is (engine, step, micro-step)."""
        self.begin_ns = begin_ns
        self.end_ns = 0
        self.phase = phase
        self.depth = depth
        self.engine, self.step, self.micro_step = position
        self.loose = loose
        self.samples_device = False  # read the device at its end
        self.begin_mark: Any = None  # CUDA event at its begin
        self.is_confirmed = True
        self.is_brief = False  # its begin is not recorded
        self.is_quick = False  # recorded with the other spans of its step
        self.flags = 0
        self.rows = self.sequence = self.tokens = UNKNOWN
        # Arguments of a forward in progress whose micro-batch is not measured yet: afterwards they are in the caches.
        self.batch: tuple[Any, Any] | None = None

    def measure_batch(self) -> None:
        """Measure the micro-batch of a forward."""
        if self.batch is not None:
            (args, kwargs), self.batch = self.batch, None
            self.rows, self.sequence, self.tokens = batch_shape.measure_batch(args, kwargs)
