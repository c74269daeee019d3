"""The library that runs a loop, as far as its settings describe the loop: the Trainer's, Lightning's, or Accelerate's."""

from __future__ import annotations

import sys
from typing import Any

TRAINER, LIGHTNING, ACCELERATE = "Trainer", "Lightning", "Accelerate"
_MIXED_PRECISIONS = ("bf16", "fp16", "fp8")


class TrainingLibrary:
    """Settings of the library; None if there is no library, or it has no such setting."""

    def __init__(self) -> None:
        self.planned_steps: int | None = None
        self._trainer: Any = None  # its TrainingArguments
        self._lightning_accumulation: int | None = None

    def follow_trainer(self, arguments: Any, steps: int) -> None:
        """Note that a Trainer begins to train, with its TrainingArguments and planned steps."""
        self._trainer, self.planned_steps = arguments, steps if steps > 0 else None

    def follow_lightning(self, accumulation: int, steps: int) -> None:
        """Note that Lightning begins to train, with its micro-batches per step and planned steps."""
        self._lightning_accumulation, self.planned_steps = accumulation, steps if steps > 0 else None

    def find_name(self) -> str:
        """Return the library's name; empty for a hand-written loop."""
        if self._trainer is not None:
            return TRAINER
        if self._lightning_accumulation is not None:
            return LIGHTNING
        return ACCELERATE if _read_shared_state("AcceleratorState") else ""

    def find_micro_batch(self) -> int | None:
        """Return the rows of a micro-batch of one device."""
        size = getattr(self._trainer, "per_device_train_batch_size", None)
        return int(size) if size is not None else None

    def find_gradient_accumulation(self) -> int | None:
        """Return the micro-batches of an optimizer step."""
        steps = getattr(self._trainer, "gradient_accumulation_steps", self._lightning_accumulation)
        if steps is None:
            settings = _read_shared_state("GradientState").get("plugin_kwargs") or {}
            steps = settings.get("num_steps", 1) if self.find_name() == ACCELERATE else None
        return int(steps) if steps is not None else None

    def find_mixed_precision(self) -> str | None:
        """Return the dtype of Accelerate's autocast, which the Trainer uses too."""
        name = str(_read_shared_state("AcceleratorState").get("_mixed_precision") or "")
        return name if name in _MIXED_PRECISIONS else None


def _read_shared_state(name: str) -> dict[str, Any]:
    owner = getattr(sys.modules.get("accelerate.state"), name, None)
    state = getattr(owner, "_shared_state", None)
    return state if isinstance(state, dict) else {}
