"""The PCIe byte counters of a GPU: of 32 bits each, dear to read, and made whole again all the same.

At the 63 GB/s of a PCIe 5 link a counter wraps every 68 ms (seen on an H200: looked at every 93 ms it said 16 GB/s of 60),
and each look takes 0.1 to 0.2 ms of processor time. So the directions in which bytes flow are looked at as often as a share
of a core allows, the others half as often. What flows between two looks is counted to the byte up to 4 GiB, and beyond that
short by whole multiples of 4 GiB. With one GPU, looked at every 50 ms, no PCIe 5 link carries so much; with eight, every
250 ms, it is 17 GB/s on average for each of them.
"""

from __future__ import annotations

from typing import NamedTuple

from zerotop_probe.recording.tables import UNKNOWN

_MODULUS = 1 << 32
# Processor time for looks while bytes flow both ways on all GPUs of the node, as a share of a core.
_MAX_CORE_SHARE = 0.011
_HALF_TICK_S = 0.05
# Half ticks from look to look; each divides a second, over which rates are shown.
_PERIODS = (1, 2, 5, 10)
_FLOWING_BYTES_PER_S = 1e9


class ReadPace(NamedTuple):
    """Half ticks of 50 ms from look to look."""

    flowing_ticks: int
    idle_ticks: int


FASTEST_PACE = ReadPace(1, 2)


def choose_pace(devices: int, look_s: float) -> ReadPace:
    """For so many GPUs, of which each look in both directions takes so many seconds of processor time."""
    needed = devices * look_s / (_MAX_CORE_SHARE * _HALF_TICK_S)
    flowing = next((period for period in _PERIODS if period >= needed), _PERIODS[-1])
    return ReadPace(flowing, min(2 * flowing, _PERIODS[-1]))


class LinkCounter:
    """One direction of a link. ``total`` is -1 until it was looked at, and never falls."""

    def __init__(self) -> None:
        self.total = UNKNOWN
        self._is_flowing = False
        self._due_tick = 0
        self._last_raw = 0
        self._last_ns = 0

    def is_due(self, half_tick: int) -> bool:
        """Whether it is time for a look."""
        return half_tick >= self._due_tick

    def add_reading(self, raw: int, now_ns: int, half_tick: int, pace: ReadPace) -> None:
        """Takes the driver's counter, read at ``now_ns``."""
        if self.total == UNKNOWN:
            self.total = raw
        else:
            more = (raw - self._last_raw) % _MODULUS
            self.total += more
            self._is_flowing = more * 1e9 > _FLOWING_BYTES_PER_S * (now_ns - self._last_ns)
        self._last_raw, self._last_ns = raw, now_ns
        self._due_tick = half_tick + (pace.flowing_ticks if self._is_flowing else pace.idle_ticks)
