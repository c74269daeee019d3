"""The turns of processes that share a GPU, as a trainer and an inference engine do that sleeps while the other trains.

A process is awake while it holds more than half way between the least and the most that it has held so far. Awake, it
holds nearly all of that, or a part, as an engine does that has got room for its weights only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zerotop.recording.samples import Ints

# A process takes turns if it gives back at least this share of its memory, and these bytes.
_GIVEN_BACK_SHARE, _GIVEN_BACK_BYTES = 0.3, 256 << 20
# It is fully awake while it holds at least this share of the most that it has held.
_FULL_SHARE = 0.9
# It wakes once it holds this share of its memory more than asleep.
_MORE_SHARE = 0.1
# What a process holds asleep is known after this time (ns): it gives memory back in parts.
SETTLED_NS = 3_000_000_000


class Cycle(NamedTuple):
    """A time awake, and the time asleep after it. Times are unix nanoseconds."""

    awake_ns: int
    asleep_ns: int
    known_ns: int  # when ``kept_bytes`` was known
    full_ns: int  # duration awake with nearly all of its memory
    held_bytes: int  # the most awake
    kept_bytes: int  # the least asleep

    @property
    def partly_ns(self) -> int:
        """How long it was awake with a part of its memory, as while weights are exchanged."""
        return self.asleep_ns - self.awake_ns - self.full_ns


def find_cycles(times: Ints, used: Ints) -> list[Cycle]:
    """Return the cycles of a process that are known, from what it held (bytes) since each time; times ascend."""
    if len(times) < 2:
        return []
    low, high = np.minimum.accumulate(used), np.maximum.accumulate(used)
    takes_turns = high - low >= np.maximum(_GIVEN_BACK_BYTES, _GIVEN_BACK_SHARE * high)
    is_awake = (used > (low + high) / 2) & takes_turns
    edges = np.flatnonzero(np.diff(is_awake.astype(np.int8), prepend=0, append=0)).tolist()
    begins = [_find_begin(used, *bounds) for bounds in zip([0, *edges[1::2]], edges[::2], strict=False)]
    cycles = []
    for number, (woken, asleep) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
        next_woken = edges[2 * number + 2] if 2 * number + 2 < len(edges) else len(times)
        settled = int(np.searchsorted(times, times[asleep] + SETTLED_NS)) if asleep < len(times) else asleep
        known = min(settled, next_woken)
        if known >= len(times):
            continue
        most, lasted = int(used[woken:asleep].max()), np.diff(times[woken : asleep + 1])
        full_ns = int(lasted[used[woken:asleep] >= _FULL_SHARE * most].sum())
        begin_ns, asleep_ns, known_ns = (int(times[at]) for at in (begins[number], asleep, known))
        kept_bytes = int(used[asleep : known + (known < next_woken)].min())
        cycles.append(Cycle(begin_ns, asleep_ns, known_ns, full_ns, most, kept_bytes))
    return cycles


def _find_begin(used: Ints, asleep: int, woken: int) -> int:
    """Return where a process began to wake, which may be in parts: it held more than the least that it held asleep."""
    before = used[asleep:woken]
    if not len(before):
        return woken
    is_more = before > before.min() + _MORE_SHARE * (used[woken] - before.min())
    return woken - int(np.argmin(is_more[::-1])) if not is_more.all() else asleep


def is_growing(kept: Sequence[int], least: int) -> bool:
    """Whether the last three values each exceed the one before, by ``least`` at least, and do not level off."""
    if len(kept) < 3:
        return False
    first, second = kept[-2] - kept[-3], kept[-1] - kept[-2]
    return min(first, second) >= least and second >= first / 2
