"""What a value of a recording is called where it is shown: its unit, lane, legend, figures, trace and clipboard.

``recording/tables.py`` declares the metrics of each table, and :data:`.tables.METRICS` has all of them by name.
"""

from __future__ import annotations

from typing import NamedTuple

# Units. Any other is shown as it is written, for example "MHz".
SHARE = "share"  # from 0 to 1, shown in percent
PERCENT = "%"  # its axis always ends at 100
SECONDS, BYTES, BYTES_PER_S, WATTS, CORES, NUMBER = "s", "bytes", "bytes/s", "W", "cores", ""
_SUFFIXES = {BYTES_PER_S: "_bytes_per_s", WATTS: "_w", SHARE: "", CORES: "", NUMBER: ""}


class Metric(NamedTuple):
    """A value over time. A column that counts bytes is shown as its rate if the metric's unit is BYTES_PER_S."""

    name: str
    unit: str
    column: str = ""  # of the table; "" if it is computed
    lane: str = ""  # of the timeline; one without a chart of its own shows means and highest values
    label: str = ""  # in the lane's legend
    style: str = ""  # of its layer
    trace: str = ""  # name of its counter in a trace
    scale: float = 1.0  # the column's value for one of the unit: 100 for percent shown as a share

    @property
    def heading(self) -> str:
        """Its name with its unit, for tables."""
        return self.name + _SUFFIXES.get(self.unit, f"_{self.unit}")

    @property
    def shows_highest(self) -> bool:
        """Whether the highest value of a period says more than the mean: of memory, a peak is what counts."""
        return self.unit == BYTES
