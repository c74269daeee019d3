"""Blocks of PyTorch's allocator at a loop's first backward, recognized by their size.

The probe records the sizes that hold the most (``unclaimed_groups``), without blocks of models and optimizers. A block is
recognized as a tensor of rows x tokens x width elements if a width from the model's configuration, and 2 or 4 bytes an
element, explain its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from zerotop.analysis.findings.support.evidence import Process
from zerotop.analysis.memory.tensor_inventory import BEFORE_BACKWARD
from zerotop_probe.recording.events import EngineFacts, Tensors

LOGITS = "vocabulary"
# A block is at most this much larger than its tensor (PyTorch does not split off less), and at most by this share.
_ROUNDING_BYTES = 1 << 20
_ROUNDING_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Blocks of one size."""

    width: str  # "vocabulary", "hidden", "intermediate" or "attention"; "" if not recognized
    shape: tuple[int, ...]  # of the tensor in each block, as far as recognized
    item_bytes: int
    size: int
    count: int

    @property
    def total_bytes(self) -> int:
        return self.size * self.count


def find_first_backward(process: Process) -> Tensors | None:
    """Return the inventory before the first backward; None if there is none."""
    return next((event for event in process.events_of(Tensors) if event.when == BEFORE_BACKWARD), None)


def read_groups(engine: EngineFacts, inventory: Tensors | None) -> list[BlockGroup]:
    """Return the blocks by size, largest total first; empty unless the model returned rows x tokens x width."""
    shapes = _list_shapes(engine, inventory)
    groups = inventory.unclaimed_groups if inventory is not None and shapes else None
    return [_recognize_blocks(group[0], group[1], shapes) for group in groups or () if len(group) == 2]


def recognize_block(engine: EngineFacts, inventory: Tensors | None, size: int) -> BlockGroup:
    """Return a block of this size as a group of one."""
    return _recognize_blocks(size, 1, _list_shapes(engine, inventory))


def _list_shapes(engine: EngineFacts, inventory: Tensors | None) -> list[tuple[str, tuple[int, ...]]]:
    output = (inventory.output_shape if inventory is not None else None) or []
    if len(output) != 3 or min(output) < 1:
        return []
    return list(_iter_shapes(engine.dimensions or {}, *output))


def _iter_shapes(
    dimensions: Mapping[str, int], rows: int, tokens: int, vocabulary: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield LOGITS, (rows, tokens, vocabulary)
    if tokens > 1:  # the last token has no next one
        yield LOGITS, (rows, tokens - 1, vocabulary)
    if "hidden" in dimensions:
        # GPT-2 and its like leave it out: the MLPs are four times as wide then.
        yield "intermediate", (rows, tokens, dimensions.get("intermediate", 4 * dimensions["hidden"]))
        yield "hidden", (rows, tokens, dimensions["hidden"])
    if "heads" in dimensions:
        yield "attention", (rows, dimensions["heads"], tokens, tokens)


def _recognize_blocks(size: int, count: int, shapes: list[tuple[str, tuple[int, ...]]]) -> BlockGroup:
    for width, shape in shapes:
        for each in (2, 4):
            needed = each * prod(shape)
            if needed <= size <= needed + min(_ROUNDING_BYTES, _ROUNDING_SHARE * needed):
                return BlockGroup(width, shape, each, size, count)
    return BlockGroup("", (), 0, size, count)
