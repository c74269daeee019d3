"""New blocks of rows x rows elements, as a tensor of [rows] makes that is broadcast with one of [rows, 1].

A block that large has a segment of its own, so the allocator's totals show its exact size, and how many there are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.formatting import Text
from zerotop.analysis.memory.block_lines import Look
from zerotop.analysis.memory.tensor_inventory import BEFORE_BACKWARD, read_held
from zerotop.recording.moments.rank_records import RankRecords
from zerotop_probe.recording.events import Tensors

# The size of an element; blocks from LARGE_BYTES on are rounded up to whole units, and are a segment each.
_ITEM_BYTES, _LARGE_BYTES, _UNIT_BYTES = (2, 4, 8), 10 << 20, 2 << 20
# How long before and after a rise the allocator is read (ns), and the part of the rise that the blocks explain.
_READ_NS, _EXPLAINED_SHARE = 30_000_000_000, 0.7


class SquareBlocks(NamedTuple):
    """Blocks that the allocator took from the device at a rise."""

    number: int
    rows: int
    item_bytes: int
    column: str  # the only known variable of [rows, 1]; empty without one
    place: str | None = None  # the only line that is known to allocate such blocks

    @property
    def bytes(self) -> int:
        """Their size in all."""
        return self.number * self.rows**2 * self.item_bytes

    @property
    def text(self) -> Text:
        """The blocks, as a part of a sentence."""
        template = (
            f"the {{number:count new block}} of memory {'has' if self.number == 1 else 'have'} {{rows:,.0f}} x {{rows:,.0f}}"
            " elements of {item_bytes:.0f} bytes (rows x rows)"
        )
        return Text(template, self._asdict())

    @property
    def advice(self) -> Text:
        """What may have made them, and what to do then."""
        template = (
            "See[ at {place}] whether a tensor of {rows:,.0f} elements is combined with one of {rows:,.0f} x 1, as in a"
            " loss: the result has {rows:,.0f} x {rows:,.0f}. Give both the same shape."
        )
        return Text(template, self._asdict())

    @property
    def fix(self) -> str:
        """The variable in the shape of the other one, or the line to change; empty if neither is known."""
        return f"{self.column}.squeeze(1)" if self.column else self.place or ""

    def find_line(self, look: Look | None) -> SquareBlocks:
        """Return the same with the line that allocates them, if a look since the rise shows only one."""
        size = self.rows**2 * self.item_bytes
        blocks = look.blocks if look is not None else ()
        places = {one.place for one in blocks if one.line is not None and any(each == size for each, _ in one.sizes)}
        return self._replace(place=places.pop()) if len(places) == 1 else self


def find_square_blocks(process: RankRecords, before_ns: int, step: Any, grown: float) -> SquareBlocks | None:
    """Return the blocks of rows x rows elements that explain a rise of the peak by ``grown`` bytes; None if that is not so.

    ``before_ns``: the end of the last step before the rise. ``step``: the first one after it (STEP_DTYPE).
    """
    between_ns, rows = (before_ns, int(step["end_unix_ns"])), float(step["rows"]) / max(1, int(step["micro_steps"]))
    read = process.records("allocator").read_window(between_ns[0] - _READ_NS, between_ns[1] + _READ_NS)
    if not len(read) or not rows > 0 or "device_allocs" not in (read.rows.dtype.names or ()):
        return None
    first = int(np.searchsorted(read.times, between_ns[0], "right")) - 1
    last = int(np.searchsorted(read.times, between_ns[1]))
    if first < 0 or last == len(read) or len(np.unique(read.rows["device"][first : last + 1])) > 1:
        return None
    count, freed, reserved = (
        int(read.rows[name][last]) - int(read.rows[name][first])
        for name in ("device_allocs", "device_frees", "reserved_bytes")
    )
    if count < 1 or freed or reserved % count or count * rows**2 * min(_ITEM_BYTES) > reserved:
        return None
    for item_bytes in _ITEM_BYTES:
        size = int(rows) ** 2 * item_bytes
        is_exact = size >= _LARGE_BYTES and count * (-(-size // _UNIT_BYTES) * _UNIT_BYTES) == reserved
        if is_exact and count * size >= _EXPLAINED_SHARE * grown and _is_new_size(process, size, between_ns[0]):
            return SquareBlocks(count, int(rows), item_bytes, _find_column(process, int(rows), between_ns[0]))
    return None


def _is_new_size(process: RankRecords, size: int, until_ns: int) -> bool:
    """Whether no block had this size when blocks were counted before, activations included."""
    counts = [one for one in process.events_of(Tensors) if one.unix_ns <= until_ns and one.unclaimed_groups]
    sizes = {group[0] for one in counts for group in one.unclaimed_groups or () if group}
    return any(one.when == BEFORE_BACKWARD for one in counts) and size not in sizes


def _find_column(process: RankRecords, rows: int, until_ns: int) -> str:
    held = [one for event in process.events_of(Tensors) if event.unix_ns <= until_ns for one in read_held(event)]
    names = {one.name for one in held if one.shape == (rows, 1)}
    return names.pop() if len(names) == 1 else ""
