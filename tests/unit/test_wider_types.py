"""Blocks with the elements of a known tensor in twice the bytes."""

from __future__ import annotations

import pytest

from zerotop.analysis.code_line import CodeLine
from zerotop.analysis.findings.support.memory.wider_types import describe_wider
from zerotop.analysis.memory.block_lines import LineBlocks, Look
from zerotop.analysis.memory.tensor_inventory import HeldTensors

SIZE = 4096 * 48000 * 4


def _look(*sizes: int, line: int = 49) -> Look:
    blocks = LineBlocks(CodeLine("train.py", line, "main", ()), "other", tuple((size, 1) for size in sizes))
    return Look("peak", 4, 0, 1, 1, 8 << 30, 0, (blocks,))


def _hold(shape: tuple[int, ...] = (4096, 48000), size: int = SIZE, count: int = 1) -> HeldTensors:
    return HeldTensors("logits", "the tensor logits", size, count, keeps_graph=False, shape=shape, view_of=(), line="")


def test_a_line_with_elements_of_twice_the_bytes_is_named() -> None:
    assert str(describe_wider([_hold()], _look(SIZE), _look(SIZE, 2 * SIZE))) == (
        "train.py:49 in main allocates 1.46 GiB, twice what 4,096 x 48,000 elements took (0.73 GiB, as logits): these are"
        " probably float64 now"
    )


@pytest.mark.parametrize(
    ("held", "before", "after"),
    [
        (_hold(), (SIZE, 2 * SIZE), (SIZE, 2 * SIZE)),  # there were such blocks before
        (_hold(), (SIZE,), (SIZE, 3 * SIZE)),
        (_hold(size=SIZE * 2), (SIZE,), (SIZE, 2 * SIZE)),  # of 8 bytes before
        (_hold(count=2), (SIZE,), (2 * SIZE,)),
        (_hold((4096, 480), 4096 * 480 * 4), (1,), (4096 * 480 * 8,)),  # small
    ],
)
def test_other_blocks_are_not(held: HeldTensors, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    assert describe_wider([held], _look(*before), _look(*after)) is None


def test_without_a_look_nothing_is_said() -> None:
    assert describe_wider([_hold()], None, _look(2 * SIZE)) is None
    assert describe_wider([_hold()], _look(SIZE), None) is None
