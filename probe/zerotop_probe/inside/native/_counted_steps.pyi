"""The classes and constants of ``counted_steps.c``."""

from collections.abc import Callable
from typing import Any

from zerotop_probe.inside import counting

SPAN_BYTES: int

def hide_frames_of(folder: str) -> None: ...

class StepCounting(counting.StepCounting): ...

class _Hook:
    counts_backwards: bool
    def __init__(
        self,
        counting: counting.StepCounting,
        otherwise: Callable[..., Any],
        original: Callable[..., Any] | None = None,
        note_failure: Callable[..., None] | None = None,
        module: int = 0,
        module_class: Any = None,
    ) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class CountedCall(_Hook): ...
class CountedForward(_Hook): ...
class BeforeUpdate(_Hook): ...
class AfterUpdate(_Hook): ...

class CollectionTimer:
    generation: int
    begin_ns: int
    spent_ns: int
    collections: int
    def __call__(self, phase: str, info: dict[str, int]) -> None: ...
