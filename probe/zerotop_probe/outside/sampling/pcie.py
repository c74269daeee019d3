"""The PCIe byte counters of a GPU: extending 32-bit counters that are expensive to read.

At the 63 GB/s of a PCIe 5 link a counter wraps every 68 ms (on an H200, reading it every 93 ms yielded 16 GB/s of 60), and
each read takes 0.1 to 0.2 ms of CPU time. So directions with traffic are read as often as a share of a core allows, idle
ones half as often, and those that were idle for half a minute a fourth. Up to 4 GiB between two reads are counted exactly;
beyond that, multiples of 4 GiB are lost. With one GPU, read every 50 ms, no PCIe 5 link carries that much; with eight, read
every 250 ms, the limit is 17 GB/s for each.
"""

from __future__ import annotations

from typing import NamedTuple

from zerotop_probe.recording.tables import UNKNOWN

_MODULUS = 1 << 32
# CPU time for reads while bytes flow both ways on all GPUs of the node, as a share of a core.
_MAX_CORE_SHARE = 0.011
_HALF_TICK_S = 0.05
# Half ticks between reads; each divides a second, over which rates are shown.
_PERIODS = (1, 2, 5, 10)
_FLOWING_BYTES_PER_S = 1e9
# A direction without traffic for this long (ns) is read half as often.
_LONG_IDLE_NS = 30_000_000_000


class ReadPace(NamedTuple):
    """Half ticks of 50 ms between reads."""

    flowing_ticks: int
    idle_ticks: int


FASTEST_PACE = ReadPace(1, 2)


def choose_pace(devices: int, read_s: float) -> ReadPace:
    """Return the pace for this many GPUs when reading both directions of one takes ``read_s`` of CPU time."""
    needed = devices * read_s / (_MAX_CORE_SHARE * _HALF_TICK_S)
    flowing = next((period for period in _PERIODS if period >= needed), _PERIODS[-1])
    return ReadPace(flowing, min(2 * flowing, _PERIODS[-1]))


class LinkCounter:
    """One direction of a link. ``total`` is -1 until the first reading, and never decreases."""

    def __init__(self) -> None:
        self.total = UNKNOWN
        self._is_flowing = False
        self._due_tick = 0
        self._last_raw = 0
        self._last_ns = 0
        self._flowed_ns = 0  # time of the last traffic, or of the first reading

    def is_due(self, half_tick: int) -> bool:
        return half_tick >= self._due_tick

    def add_reading(self, raw: int, now_ns: int, half_tick: int, pace: ReadPace) -> None:
        """Add the driver's counter, read at ``now_ns``."""
        if self.total == UNKNOWN:
            self.total, self._flowed_ns = raw, now_ns
        else:
            moved = (raw - self._last_raw) % _MODULUS
            self.total += moved
            self._is_flowing = moved * 1e9 > _FLOWING_BYTES_PER_S * (now_ns - self._last_ns)
        self._last_raw, self._last_ns = raw, now_ns
        wait_ticks = pace.flowing_ticks if self._is_flowing else pace.idle_ticks
        if self._is_flowing:
            self._flowed_ns = now_ns
        elif now_ns - self._flowed_ns > _LONG_IDLE_NS:
            wait_ticks *= 2
        self._due_tick = half_tick + wait_ticks
