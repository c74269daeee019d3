"""The same collectives on all ranks of a process group: how long each rank's GPU was in them, and when it launched them.

A collective ends on all ranks at the same moment: who was in it for the shortest time was the last to begin it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from zerotop.session.samples import Floats, Ints


class Collectives(NamedTuple):
    """Blocks of consecutive collectives that all ranks have timed. Two-dimensional arrays have a row for each rank."""

    numbers: Ints  # of the blocks, ascending
    spent_s: Floats  # the device's time in each block's collectives
    launched_ns: Ints  # mean time at which they were launched, unix nanoseconds
    block_bytes: Ints
    block: int  # collectives in a block

    def count_per_second(self) -> float:
        """Return how many blocks were launched in a second; NaN for less than two."""
        if len(self.numbers) < 2:
            return float("nan")
        passed_ns = int(self.launched_ns[0, -1] - self.launched_ns[0, 0])
        return float(self.numbers[-1] - self.numbers[0]) / passed_ns * 1e9 if passed_ns > 0 else float("nan")


def align_collectives(
    facts: Sequence[Mapping[str, Any]], ranks: Sequence[int], offsets_ns: Sequence[int]
) -> Collectives | None:
    """Return the collectives of the busiest process group that has exactly these ranks; None without common blocks.

    Args:
        facts: of an event ``collective_times`` of each rank, in the order of the ranks.
        ranks: global ranks.
        offsets_ns: what to add to each rank's monotonic times for unix time.
    """
    by_group = [
        {group["group"]: group for group in one["groups"] if sorted(group["ranks"]) == sorted(ranks)} for one in facts
    ]
    shared = set(by_group[0]).intersection(*by_group[1:])
    found = [_align_group([groups[name] for groups in by_group], offsets_ns, int(facts[0]["block"])) for name in shared]
    return max((one for one in found if one is not None), key=lambda one: len(one.numbers), default=None)


def _align_group(groups: Sequence[Mapping[str, Any]], offsets_ns: Sequence[int], block: int) -> Collectives | None:
    if not all(map(_is_whole, groups)):
        return None
    known = [{number: index for index, number in enumerate(group["numbers"])} for group in groups]
    numbers = sorted(set(known[0]).intersection(*known[1:]))
    if not numbers:
        return None
    places = [np.array([at[number] for number in numbers]) for at in known]
    spent = [np.sum(list(group["spent_ns"].values()), axis=0)[place] for group, place in zip(groups, places, strict=True)]
    launched = [
        np.array(group["launched_ns"], np.int64)[place] + offset
        for group, place, offset in zip(groups, places, offsets_ns, strict=True)
    ]
    sizes = np.array(groups[0]["bytes"], np.int64)[places[0]]
    return Collectives(np.array(numbers), np.array(spent) / 1e9, np.array(launched), sizes, block)


def _is_whole(group: Mapping[str, Any]) -> bool:
    """Whether all lists of an event's group are of the same length."""
    lists = [group["numbers"], group["launched_ns"], group["bytes"], *group["spent_ns"].values()]
    return bool(group["spent_ns"]) and len({len(one) for one in lists}) == 1
