"""Blocks of a line that have as many elements as a known tensor had, if these are twice as wide: float64 from NumPy."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from zerotop.analysis.formatting import Text
from zerotop.analysis.memory.block_lines import Look
from zerotop.analysis.memory.leak_holders import LeakAdvice
from zerotop.analysis.memory.tensor_inventory import HeldTensors

# The bytes of an element before, the smallest block that counts, and by how much PyTorch rounds one up.
_WIDTH, _LEAST_BYTES, _ROUNDED = 4, 32 << 20, 512
ADVICE = LeakAdvice(
    "Arrays of NumPy are float64 by default, and one such tensor makes each result with it float64. If that is not meant,"
    " convert it once.",
    "torch.from_numpy(array).float()",
)


def describe_wider(held: Iterable[HeldTensors], earlier: Look | None, look: Look | None) -> Text | None:
    """Return what a line allocates for as many elements as a variable had before, in twice the bytes; None without any.

    ``held``: variables before, at a count. ``earlier``: the look before, in which no line had such blocks.
    """
    if look is None or earlier is None:
        return None
    old = {size for blocks in earlier.blocks for size, _ in blocks.sizes}
    named = [blocks for blocks in reversed(look.blocks) if blocks.line is not None]  # the one with the most is the last
    fresh = {size: blocks for blocks in named for size, _ in blocks.sizes if size not in old}
    for one in sorted(held, key=lambda one: one.bytes, reverse=True):
        size = prod(one.shape) * _WIDTH
        is_alone = one.count == 1 and len(one.shape) > 1 and size >= _LEAST_BYTES and 0 <= one.bytes - size < _ROUNDED
        if is_alone and 2 * size in fresh:
            values = {"line": fresh[2 * size].text, "bytes": 2 * size, "name": one.name, "before": size}
            shape = " x ".join(f"{count:,}" for count in one.shape)
            template = (
                "{line} allocates {bytes:bytes}, twice what {shape} elements took ({before:bytes}, as {name}): these are"
                " probably float64 now"
            )
            return Text(template, values | {"shape": shape})
    return None
