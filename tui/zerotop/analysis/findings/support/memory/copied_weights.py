"""Copies of a model's weights that are allocated beside it from the start: of a checkpoint, an average, another model."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import NamedTuple

from zerotop.analysis.findings.support.evidence import Process
from zerotop.analysis.memory.expected.optimizer_states import DTYPE_BYTES
from zerotop.analysis.memory.tensor_inventory import AFTER_UPDATE, INIT, HeldTensors, read_held
from zerotop_probe.recording.events import Tensors

# The weights, by category, of which there may be copies.
_WEIGHTS = (("parameters", "frozen_parameters"), ("frozen_parameters",), ("parameters",))
# By how much a variable may differ from whole copies. Blocks in no category may hold as many other bytes beside them.
_SAME_SHARE, _OTHER_SHARE = 0.002, 0.25
# A block is up to so much larger than its tensor: PyTorch does not split off less. So copies may differ by a share in all.
_ROUNDED_BYTES, _ROUNDED_SHARE = 1 << 20, 0.02
# The part of the weights whose blocks have to be found as often as there are copies, and the fewest tensors of a copy.
_FOUND_SHARE, _FEWEST_TENSORS = 0.8, 10
# More copies than anyone has on purpose or by accident: another reason fits better.
_MOST_COPIES = 16


class WeightCopies(NamedTuple):
    """Whole copies of the weights, and the variable that holds them, if it is known. ``allocated_bytes``: in all."""

    copies: int
    weight_bytes: int
    is_of_frozen: bool  # of the frozen parameters alone
    holder: HeldTensors | None
    known_ns: int = 0
    allocated_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.copies * self.weight_bytes


def find_copies(process: Process, until_ns: int) -> WeightCopies | None:
    """Return copies that were there before the first forward, and stayed after the first update; None without any."""
    counts = [one for one in process.events_of(Tensors) if one.unix_ns <= until_ns and one.unclaimed_bytes is not None]
    if not counts or counts[0].when != INIT:
        return None
    later = next((index for index, one in enumerate(counts) if one.when == AFTER_UPDATE), None)
    found = (_find_held(counts[0]) or _find_blocks(process, counts[0])) if later is not None else None
    if later is None or found is None:
        return None
    least = min(one.unclaimed_bytes or 0 for one in counts[: later + 1])
    if least < (1 - _SAME_SHARE) * found.bytes:
        return None
    return found._replace(known_ns=counts[later].unix_ns, allocated_bytes=counts[later].allocated_bytes or 0)


def _find_held(event: Tensors) -> WeightCopies | None:
    """Return the copies that one variable holds: as many bytes as a multiple of the weights, in many tensors."""
    device = event.device or {}
    for names in _WEIGHTS:
        weight_bytes = sum(device.get(name, 0) for name in names)
        for holder in read_held(event) if weight_bytes else ():
            copies = round(holder.bytes / weight_bytes)
            is_whole = abs(holder.bytes - copies * weight_bytes) <= _SAME_SHARE * weight_bytes
            if 1 <= copies <= _MOST_COPIES and is_whole and holder.count >= copies * _FEWEST_TENSORS:
                return WeightCopies(copies, weight_bytes, names == ("frozen_parameters",), holder)
    return None


def _find_blocks(process: Process, event: Tensors) -> WeightCopies | None:
    """Return the copies whose blocks have the sizes of the trained parameters, each as often as there are copies."""
    kinds = [kind for one in process.engine.optimizers or () for kind in one.tensors or ()]
    weight_bytes, groups = (event.device or {}).get("parameters", 0), event.unclaimed_groups or []
    copies = int((event.unclaimed_bytes or 0) / weight_bytes + _ROUNDED_SHARE) if weight_bytes else 0
    if not 1 <= copies <= _MOST_COPIES or (event.unclaimed_bytes or 0) > (copies + _OTHER_SHARE) * weight_bytes:
        return None
    tensors: dict[int, int] = {}
    for kind in kinds:
        size = prod(kind.shape) * DTYPE_BYTES.get(kind.dtype, 2)
        tensors[size] = tensors.get(size, 0) + kind.count
    found_bytes = found_tensors = 0
    for size, larger in pairwise([*sorted(tensors), max(tensors, default=0) + 2 * _ROUNDED_BYTES]):
        limit = min(size + _ROUNDED_BYTES, larger)
        blocks = sum(count for block, count in groups if size <= block < limit)
        if blocks >= copies * tensors[size]:
            found_bytes, found_tensors = found_bytes + size * tensors[size], found_tensors + tensors[size]
    is_found = found_bytes >= _FOUND_SHARE * weight_bytes and found_tensors >= _FEWEST_TENSORS
    return WeightCopies(copies, weight_bytes, False, None) if is_found else None
