"""The values that a column of a table can have at most. Its name says what it measures, and in which unit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop_probe.recording.tables import UNKNOWN, Table

Rows = NDArray[Any]
Mask = NDArray[np.bool_]

_MAX_MEMORY = 1 << 47  # bytes: the address space of a process
_MAX_DEVICE_MEMORY = 1 << 42
_MAX_MOVED = 1 << 60  # bytes in all
_MAX_TIME = 1 << 61  # nanoseconds: years of many processors
# By the end of the column's name, the first that fits. Each is far beyond any machine, to be sure.
_HIGHEST = {
    **dict.fromkeys(("pcie_tx_bytes", "pcie_rx_bytes", "swap_in_bytes", "swap_out_bytes"), _MAX_MOVED),
    "_bytes": _MAX_MEMORY,
    "_ns": _MAX_TIME,
    "_percent": 1e3,
    "_w": 1e5,
    "_c": 1e3,
    "_mhz": 1e6,
    "waiting_cores": 1e10,  # samplers of earlier versions wrote up to 1e9 while a process ended
    **dict.fromkeys(("cores", "cores_used", "load", "loader_blocked"), 1e6),
    **dict.fromkeys(("major_faults", "boundaries"), 1 << 48),
    "tokens": 1 << 40,
    **dict.fromkeys(("rows", "sequence"), 1 << 28),
    **dict.fromkeys(("thread_count", "busy_threads", "loader_workers", "child_processes"), 1 << 22),
}
_MAX_COUNT = 1 << 30  # of other integers of 32 bits
_ON_DEVICES = ("allocator", "gpus", "gpu_processes")
_MAY_BE_NEGATIVE = ("_c", "cost_ns")  # the latter by probes of earlier versions
# How much they rise in a second at most: counters of the whole host, and memory in use, from one record to the next even
# if that is of another process.
_FASTEST = {
    **dict.fromkeys(("swap_in_bytes", "swap_out_bytes"), 1 << 36),
    "cgroup_oom_kills": 10_000,
    **dict.fromkeys(("rss_bytes", "shared_bytes", "pinned_bytes", "locked_bytes", "swap_bytes"), 1 << 43),
    **dict.fromkeys(("swap_used_bytes", "cgroup_used_bytes", "memory_available_bytes", "memory_total_bytes"), 1 << 43),
}
_COUNTERS = ("swap_in_bytes", "swap_out_bytes", "cgroup_oom_kills")
_SLACK_S = 1.0
# Steps go on by one, and jump where a checkpoint is loaded, but a few records alone do not. After the last ones none follow.
_LONE_STEPS, _MOST_LONE, _LAST_STEPS = 1_000, 8, 1 << 20


_ROWS_AT_ONCE = 64


class ValueLimits:
    """Finds the records of one table with values that cannot be."""

    def __init__(self, table: Table) -> None:
        self._highest: dict[str, float] = {}
        for field in table.fields:
            limit = next((limit for end, limit in _HIGHEST.items() if field.name.endswith(end)), None)
            if limit == _MAX_MEMORY and table.name in _ON_DEVICES:
                limit = _MAX_DEVICE_MEMORY
            if limit is None and field.code == "i":
                limit = _MAX_COUNT
            if limit is not None and field.name != table.time_column and field.name != "begin_ns":
                self._highest[field.name] = limit
        self._time_column = table.time_column
        self._has_steps = {"step", "engine"} <= {field.name for field in table.fields}
        self._fastest = {name: fastest for name, fastest in _FASTEST.items() if any(f.name == name for f in table.fields)}

    def find_impossible(self, rows: Rows, before: Rows) -> Mask:
        """Return which records, shape (n,), have an impossible value. ``before``: the record before them, if any."""
        combined = _combine_bits(rows)
        impossible = self._find_outside(rows, combined)
        if self._fastest:
            self._find_jumps(rows, before, impossible, combined)
        if self._has_steps:
            _find_lone_steps(rows, before, impossible)
        return impossible

    def find_suspects(self, rows: Rows, before: Rows, counts: Sequence[int]) -> Mask:
        """Return which records of several files may have an impossible value; all others are possible.

        ``rows``: ``counts`` records of each file; ``before``: the record before them in each file.
        """
        suspects = self._find_outside(rows, _combine_bits(rows))
        begins = np.cumsum(counts) - counts
        for name in self._fastest.keys() & set(rows.dtype.names or ()):
            values = rows[name]
            if name in _COUNTERS:
                earlier = np.append(values[:1], values[:-1])
                earlier[begins] = before[name]
                suspects |= values < earlier
                values = values - earlier
            suspects |= values > self._fastest[name] * _SLACK_S
        if self._has_steps:
            suspects |= np.abs(rows["step"].astype(np.int64) - before["step"].repeat(counts)) > _LONE_STEPS
        return suspects

    def _find_outside(self, rows: Rows, combined: dict[str, Any]) -> Mask:
        """Return which records have a value that no record can have. ``combined``: the bits of all of them by column."""
        outside = np.zeros(len(rows), np.bool_)
        for name, highest in self._highest.items():
            if 0 <= combined.get(name, 0) <= highest:
                continue
            values = rows[name]
            lowest = -highest if name.endswith(_MAY_BE_NEGATIVE) else UNKNOWN
            if not (np.fmax.reduce(values) <= highest and np.fmin.reduce(values) >= lowest):  # or all are NaN
                outside |= (values > highest) | (values < lowest)
        if {"used_bytes", "total_bytes"} <= combined.keys():
            above = rows["used_bytes"] > rows["total_bytes"]
            if above.any():
                outside |= above & (rows["total_bytes"] > 0)
        return outside

    def _find_jumps(self, rows: Rows, before: Rows, impossible: Mask, combined: dict[str, Any]) -> None:
        """Add the records whose memory or counters rise faster than any machine's, or whose counters fall."""
        for name, fastest in self._fastest.items():
            # Most memory is less than could be allocated in a second.
            if name not in combined or (name not in _COUNTERS and 0 <= combined[name] <= fastest * _SLACK_S):
                continue
            chosen = np.flatnonzero(~impossible & (rows[name] >= 0))
            first = before if len(before) else rows[chosen[:1]]
            values, times = (np.concatenate((first[one], rows[one][chosen])) for one in (name, self._time_column))
            rises = np.diff(values.astype(np.float64))
            seconds = np.maximum(0.0, np.diff(times / 1e9)) + _SLACK_S
            jumps = (rises > fastest * seconds) & (values[:-1] >= 0)
            falls = (rises < 0) & (name in _COUNTERS)
            falls[1:] &= ~jumps[:-1]  # back from a jump
            impossible[chosen[jumps | falls]] = True


@cache
def limit_values(table: Table) -> ValueLimits:
    """Return the limits of a table, of which there may be very many files."""
    return ValueLimits(table)


def _find_lone_steps(rows: Rows, before: Rows, impossible: Mask) -> None:
    """Add the few records whose step is far from those of the records around them. Each engine has its own steps."""
    steps, last = rows["step"], int(before["step"][-1]) if len(before) else int(rows["step"][0])
    if max(abs(int(steps.max()) - last), abs(int(steps.min()) - last)) <= _LONE_STEPS:
        return
    engines = rows["engine"]
    changes = np.diff(steps.astype(np.int64), prepend=last)
    if not impossible.any() and (engines == engines[0]).all() and np.abs(changes).max() <= _LONE_STEPS:
        return
    for engine in np.unique(engines):
        chosen = np.flatnonzero(~impossible & (engines == engine) & (steps >= 0))
        known = before["step"][before["engine"] == engine]
        values = np.concatenate((known, steps[chosen])).astype(np.int64)
        end = 0
        for place in np.flatnonzero(np.abs(np.diff(values)) > _LONE_STEPS).tolist():
            if place < end:
                continue
            near = np.abs(values[place + 1 : place + 2 + _MOST_LONE] - values[place]) <= _LONE_STEPS
            end = place + 1 + (int(near.argmax()) if near.any() else 0)
            if not near.any() and place + 2 + _MOST_LONE > len(values) and values[place + 1] - values[place] > _LAST_STEPS:
                end = len(values)
            impossible[chosen[place + 1 - len(known) : end - len(known)]] = True


def _combine_bits(rows: Rows) -> dict[str, Any]:
    """Return the bits of all values of each column: where that is not negative, no value is, and none is higher.

    The bits of floats above 0 are in the order of their values. This reads memory once for all columns.
    """
    size = rows.dtype.itemsize
    data = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, size)
    if len(rows) >= _ROWS_AT_ONCE:
        rest = len(rows) % _ROWS_AT_ONCE
        many = np.bitwise_or.reduce(data[rest:].reshape(-1, _ROWS_AT_ONCE * size)).reshape(-1, size)
        data = np.concatenate((data[:rest], many))
    return dict(zip(rows.dtype.names or (), np.bitwise_or.reduce(data).view(rows.dtype)[0].item(), strict=True))
