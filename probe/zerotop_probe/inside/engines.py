"""The probe's state of whatever trains in this process: DeepSpeed engines, or a loop of PyTorch's own optimizers."""

from __future__ import annotations

import weakref
from typing import Any

from zerotop_probe.inside.span import Span

# A record stores the engine's number in one byte.
_LAST_INDEX = 255


class TrainingState:
    """State of one engine or loop: its number, its steps, and the backwards since the last step."""

    finished_steps: int
    """Optimizer steps done so far."""

    def __init__(self, index: int) -> None:
        self.index = min(index, _LAST_INDEX)
        self.has_optimizer = False
        # Backwards since the last optimizer step. A DeepSpeed engine's own micro_steps counts calls of step().
        self.backward_count = 0
        # Moments (``when`` of the tensors event) whose inventory is recorded.
        self.recorded_inventories: set[str] = set()

    def get_position(self, *, after_backward: bool = False) -> tuple[int, int, int]:
        """Return (engine, step, micro-step) of a phase that begins now; ``after_backward``: of the micro-step just done."""
        return self.index, self.finished_steps, max(0, self.backward_count - after_backward)


class EngineState(TrainingState):
    """State of one DeepSpeed engine, with the facts that every boundary needs."""

    def __init__(self, engine: Any, index: int) -> None:
        super().__init__(index)
        self.reference = weakref.ref(engine)
        # The backward in progress, if loss.backward() began it and not the engine.
        self.direct_backward: Span | None = None
        # The losses given to backward() since the last optimizer step, if they are numbers on the host.
        self.losses: list[float] = []
        self.uses_loss_scale = False
        self.offloads_optimizer = False
        self.offloads_parameters = False
        # Phase name of each inner optimizer, by id().
        self.inner_phases: dict[int, str] = {}

    @property
    def finished_steps(self) -> int:  # type: ignore[override]
        """The engine's ``global_steps``; 0 once the engine is gone."""
        engine = self.reference()
        return int(engine.global_steps) if engine is not None else 0


class LoopState(TrainingState):
    """State of a loop that steps PyTorch's optimizers itself. All loops of a process count as one."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.has_optimizer = True
        self.finished_steps = 0


class EngineRegistry:
    """The engines that train in this process, by identity and through weak references, or its loop."""

    def __init__(self) -> None:
        self._state_by_id: dict[int, EngineState] = {}
        self.engine_count = 0
        # The loop that trains without an engine.
        self.loop: LoopState | None = None
        # A DeepSpeed engine is or was made in this process: its hooks see everything, those on loops are silent.
        self.belongs_to_deepspeed = False
        # The engine or loop that trained last: phases without an engine count to its step.
        self.current: TrainingState | None = None

    def add(self, engine: Any) -> EngineState:
        state = self._state_by_id[id(engine)] = EngineState(engine, self.next_number)
        self.engine_count = max(self.engine_count, state.index + 1)
        self.loop = None
        return state

    @property
    def next_number(self) -> int:
        """The number of the next engine. It takes over that of a loop before it, because readers follow number 0."""
        return self.loop.index if self.loop is not None else self.engine_count

    def add_loop(self) -> LoopState:
        """Add the loop of a process without engines."""
        self.loop = self.current = LoopState(self.next_number)
        self.engine_count += 1
        return self.loop

    def find_state(self, engine: Any) -> EngineState | None:
        """Return the state of an engine, or None."""
        state = self._state_by_id.get(id(engine))
        # Not of an earlier object at the same address.
        return state if state is not None and state.reference() is engine else None

    def get_position(self) -> tuple[int, int, int]:
        """Return (engine, step, micro-step) of the engine or loop that trained last."""
        return self.current.get_position() if self.current is not None else (0, 0, 0)
