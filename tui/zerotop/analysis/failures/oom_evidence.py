"""One failure to get memory, as far as it is known: what the reasons and the advice follow from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zerotop.analysis.memory.allocator_settings import AllocatorSettings

NOTABLE_SHARE = 0.05
"""Other processes, or pinned memory's rounding, are worth a sentence from this share of the whole on."""


@dataclass(frozen=True, slots=True)
class OomCase:
    """What is known of one failure. Bytes; None is not known."""

    kind: str  # as in oom_text
    requested: int | None = None
    limit: int | None = None  # what the process may use of the device, or of host memory
    total: int | None = None  # the device's
    free: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    largest_block: int | None = None
    inactive_split: int | None = None
    others: int | None = None  # the device's memory held by processes that are not this one
    model_states: int | None = None  # parameters, gradients, master weights and state on the device
    phase: str = ""  # the outermost
    rows: int | None = None  # of the last micro-batch
    sequence: int | None = None
    tokens: int | None = None
    largest: Mapping[str, int] = field(default_factory=dict)  # rows, sequence, tokens of training's largest before
    host_used: int | None = None
    pinned_spare: int = 0  # of host memory, by the rounding of pinned requests
    kill_count: int = 0  # processes, by the kernel
    torch: str = ""
    settings: AllocatorSettings | None = None  # of PyTorch's allocator
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unallocated_bytes(self) -> int | None:
        """What PyTorch holds and nobody uses."""
        return None if self.reserved is None or self.allocated is None else max(0, self.reserved - self.allocated)

    @property
    def batch_text(self) -> str:
        """The last micro-batch in words."""
        return describe_batch({"rows": self.rows or 0, "sequence": self.sequence or 0})

    @property
    def batch_ratio(self) -> float | None:
        """How many times training's largest micro-batch before it was; None where sizes are not known."""
        for mine, name in ((self.tokens, "tokens"), (self.rows, "rows")):
            before = self.largest.get(name)
            if mine and before:
                return mine / before
        return None

    @property
    def releasable_bytes(self) -> int:
        """What of that lies in segments that are wholly free."""
        return max(0, (self.unallocated_bytes or 0) - (self.inactive_split or 0))


def format_size(count: int) -> str:
    """Return a placeholder for bytes in the template of a :class:`~zerotop.analysis.formatting.Text`."""
    return f"{{{int(count)}:size}}"


def describe_batch(batch: Mapping[str, int]) -> str:
    """``160 x 1024 tokens``, or only the rows; "" where they are not known."""
    rows, sequence = batch.get("rows"), batch.get("sequence")
    if not rows:
        return ""
    return f"{rows} x {sequence} tokens" if sequence else f"{rows} rows"
