"""Whether a rank waits for its data now, by the last records of its phases."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from zerotop_probe.recording.tables import PHASE_CODE, SPANS

# The last waits that count, the share of the time since the first of them, and how long they are on average (ns).
_WAITS = 6
_SHARE = 0.2
_LEAST_NS = 20_000_000
_DATA = PHASE_CODE["data"]
_NAMES = [field.name for field in SPANS.fields]
_PHASE, _DEPTH = _NAMES.index("phase"), _NAMES.index("depth")


class DataWaits:
    """The last times in which one rank loaded data."""

    def __init__(self) -> None:
        self._struct = SPANS.record_struct
        self._waits: deque[tuple[int, int]] = deque(maxlen=_WAITS)

    def add_records(self, table: str, records: Iterable[bytes]) -> None:
        """Take new records of the rank; those of other tables are left out."""
        if table == SPANS.name:
            for record in records:
                span = self._struct.unpack(record)
                if span[_PHASE] == _DATA and not span[_DEPTH]:
                    self._waits.append((span[0], span[1]))

    def is_waiting(self) -> bool:
        """Whether the rank has spent a notable part of its last iterations so. Any thread may ask."""
        waits = list(self._waits)
        if len(waits) < _WAITS:
            return False
        total_ns = sum(end - begin for begin, end in waits)
        return total_ns >= max(_WAITS * _LEAST_NS, _SHARE * (time.monotonic_ns() - waits[0][0]))
