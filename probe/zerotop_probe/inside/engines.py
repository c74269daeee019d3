"""What the probe knows of each DeepSpeed engine of this process."""

from __future__ import annotations

import weakref
from typing import Any

from zerotop_probe.inside.span import Span

# The engine's number is one byte in a record.
_LAST_INDEX = 255


class EngineState:
    """One engine: its number, its facts that matter at every boundary, and our count of its backwards."""

    def __init__(self, engine: Any, index: int) -> None:
        self._reference = weakref.ref(engine)
        self.index = min(index, _LAST_INDEX)
        # Backwards since the last optimizer step; the engine's own micro_steps counts calls of step().
        self.backward_count = 0
        # The backward in progress that loss.backward() has begun, not the engine.
        self.direct_backward: Span | None = None
        self.uses_loss_scale = False
        self.offloads_optimizer = False
        self.offloads_parameters = False
        self.has_optimizer = False
        # What its inner optimizers' phases are called, by the optimizer's id.
        self.inner_phases: dict[int, str] = {}
        # The moments of which it is recorded whose the bytes were.
        self.recorded_inventories: set[str] = set()

    def belongs_to(self, engine: Any) -> bool:
        """Whether this is about that object, and not about one that lay at the same address before."""
        return self._reference() is engine

    def get_position(self, *, after_backward: bool = False) -> tuple[int, int, int]:
        """(engine, step, micro-step) of what begins now; ``after_backward``: of the micro-step just done."""
        engine = self._reference()
        step = engine.global_steps if engine is not None else 0
        return self.index, step, max(0, self.backward_count - after_backward)


class EngineRegistry:
    """All engines of this process, by identity; none is kept alive."""

    def __init__(self) -> None:
        self._state_by_id: dict[int, EngineState] = {}
        self.engine_count = 0
        # The one that trained last: what is not done by an engine is counted to its step.
        self.current: EngineState | None = None

    def add(self, engine: Any) -> EngineState:
        """Takes a new engine in."""
        known = self._state_by_id[id(engine)] = EngineState(engine, self.engine_count)
        self.engine_count += 1
        return known

    def find_state(self, engine: Any) -> EngineState | None:
        """What is known of an engine, or None."""
        known = self._state_by_id.get(id(engine))
        return known if known is not None and known.belongs_to(engine) else None

    def get_position(self) -> tuple[int, int, int]:
        """Where the engine that trained last is."""
        return self.current.get_position() if self.current is not None else (0, 0, 0)
