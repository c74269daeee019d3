"""The values that a column of a table can have at most. Its name says what it measures, and in which unit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop_probe.recording.tables import HOSTS, UNKNOWN, Table

Rows = NDArray[Any]
Mask = NDArray[np.bool_]

_MAX_MEMORY = 1 << 47  # bytes: the address space of a process
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
    **dict.fromkeys(("cores", "cores_used", "load", "loader_blocked"), 1e6),
    **dict.fromkeys(("major_faults", "tokens", "rows", "boundaries"), 1 << 48),
}
_MAY_BE_NEGATIVE = ("_c",)
# Counters of the whole host, and how much they rise in a second at most.
_FASTEST = {"swap_in_bytes": 1 << 36, "swap_out_bytes": 1 << 36, "cgroup_oom_kills": 10_000}
_SLACK_S = 1.0


class ValueLimits:
    """Finds the records of one table with values that cannot be."""

    def __init__(self, table: Table) -> None:
        self._highest: dict[str, float] = {}
        for field in table.fields:
            limit = next((limit for end, limit in _HIGHEST.items() if field.name.endswith(end)), None)
            if limit is not None and field.name != table.time_column and field.name != "begin_ns":
                self._highest[field.name] = limit
        self._time_column = table.time_column
        self._fastest = _FASTEST if table is HOSTS else {}

    def find_impossible(self, rows: Rows, before: Rows) -> Mask:
        """Return which records, shape (n,), have an impossible value. ``before``: the record before them, if any."""
        impossible = np.zeros(len(rows), np.bool_)
        names = rows.dtype.names or ()
        for name, highest in self._highest.items():
            if name not in names:
                continue
            values = rows[name]
            lowest = -highest if name.endswith(_MAY_BE_NEGATIVE) else UNKNOWN
            if not (np.fmax.reduce(values) <= highest and np.fmin.reduce(values) >= lowest):  # or all are NaN
                impossible |= (values > highest) | (values < lowest)
        if self._fastest:
            self._find_jumps(rows, before, impossible)
        return impossible

    def _find_jumps(self, rows: Rows, before: Rows, impossible: Mask) -> None:
        """Add the records whose counters rise faster than any machine's, or fall."""
        for name, fastest in self._fastest.items():
            if name not in (rows.dtype.names or ()):
                continue
            chosen = np.flatnonzero(~impossible & (rows[name] >= 0))
            values = np.concatenate((before if len(before) else rows[chosen[:1]], rows[chosen]))
            rises = np.diff(values[name].astype(np.float64))
            seconds = np.maximum(0.0, np.diff(values[self._time_column] / 1e9)) + _SLACK_S
            jumps = (rises > fastest * seconds) & (values[name][:-1] >= 0)
            falls = rises < 0
            falls[1:] &= ~jumps[:-1]  # back from a jump
            impossible[chosen[jumps | falls]] = True
