"""The probe's state for each DeepSpeed engine of this process."""

from __future__ import annotations

import weakref
from typing import Any

from zerotop_probe.inside.span import Span

# A record stores the engine's number in one byte.
_LAST_INDEX = 255


class EngineState:
    """State of one engine: its number, the facts that every boundary needs, and a count of its backwards."""

    def __init__(self, engine: Any, index: int) -> None:
        self._reference = weakref.ref(engine)
        self.index = min(index, _LAST_INDEX)
        # Backwards since the last optimizer step. The engine's own micro_steps counts calls of step().
        self.backward_count = 0
        # The backward in progress, if loss.backward() began it and not the engine.
        self.direct_backward: Span | None = None
        self.uses_loss_scale = False
        self.offloads_optimizer = False
        self.offloads_parameters = False
        self.has_optimizer = False
        # Phase name of each inner optimizer, by id().
        self.inner_phases: dict[int, str] = {}
        # Moments (``when`` of the tensors event) whose inventory is recorded.
        self.recorded_inventories: set[str] = set()

    def belongs_to(self, engine: Any) -> bool:
        """Return whether this is the state of that object, and not of an earlier one at the same address."""
        return self._reference() is engine

    def get_position(self, *, after_backward: bool = False) -> tuple[int, int, int]:
        """Return (engine, step, micro-step) of a phase that begins now; ``after_backward``: of the micro-step just done."""
        engine = self._reference()
        step = engine.global_steps if engine is not None else 0
        return self.index, step, max(0, self.backward_count - after_backward)


class EngineRegistry:
    """The engines of this process by identity, through weak references."""

    def __init__(self) -> None:
        self._state_by_id: dict[int, EngineState] = {}
        self.engine_count = 0
        # The engine that trained last: phases without an engine count to its step.
        self.current: EngineState | None = None

    def add(self, engine: Any) -> EngineState:
        """Add a new engine."""
        state = self._state_by_id[id(engine)] = EngineState(engine, self.engine_count)
        self.engine_count += 1
        return state

    def find_state(self, engine: Any) -> EngineState | None:
        """Return the state of an engine, or None."""
        state = self._state_by_id.get(id(engine))
        return state if state is not None and state.belongs_to(engine) else None

    def get_position(self) -> tuple[int, int, int]:
        """Return (engine, step, micro-step) of the engine that trained last."""
        return self.current.get_position() if self.current is not None else (0, 0, 0)
