"""The timeline's lanes, and how many rows each gets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from zerotop_probe.recording.metrics import Metric
from zerotop_probe.recording.tables import METRICS

MARKS, FAULTS, RIBBONS, STEPS, TIME, SUMMARY = "marks", "faults", "ribbons", "steps", "time", "summary"


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane of values, shown if any of them is recorded."""

    name: str
    min_rows: int = 1
    max_rows: int = 3
    importance: int = 2
    weight: int = 1  # its share of extra rows

    @property
    def metrics(self) -> list[Metric]:
        """The metrics that it shows."""
        return [metric for metric in METRICS.values() if metric.lane == self.name]


# From top to bottom: computation, memory, then what follows from both.
_LANES = (
    Lane("utilization", 1, 6, 9, 3),
    Lane("cores", 1, 6, 8, 3),
    Lane("memory", 2, 8, 7, 3),
    Lane("host memory", 2, 8, 3, 3),
    Lane("pcie", 1, 4, 4, 2),
    Lane("iteration", 1, 4, 6, 2),
    Lane("loss", 1, 4, 5, 2),
)
_MIN_HEIGHT = 22  # below this, other lanes, such as power, which follows utilization, get no row
OTHER_METRICS = [metric for metric in METRICS.values() if metric.lane not in ("", *(lane.name for lane in _LANES))]
"""The metrics whose lanes are like any other."""
LANES_BY_NAME = {lane.name: lane for lane in (*_LANES, *(Lane(metric.lane) for metric in OTHER_METRICS))}
LANES = tuple(LANES_BY_NAME.values())


@dataclass(frozen=True, slots=True)
class LaneBox:
    """The place of a lane or another part of the picture. ``first_rows``: rows of the first of several ribbons."""

    name: str
    top: int
    height: int
    first_rows: int = 1


def choose_lanes(recorded: Collection[str]) -> list[Lane]:
    """Return the lanes that have data. Host memory gets more important without a GPU."""
    lanes = [lane for lane in LANES if any(metric.name in recorded for metric in lane.metrics)]
    if any(lane.name == "memory" for lane in lanes):
        return lanes
    return [replace(lane, importance=7) if lane.name == "host memory" else lane for lane in lanes]


def layout_lanes(height: int, recorded: Collection[str], ranks: int, *, marks: bool, faults: bool = False) -> list[LaneBox]:
    """Place all lanes in ``height`` rows. ``ranks``: the largest number of ribbons."""
    rows = _choose_fixed_rows(height, ranks > 0, marks, faults)
    room = height - sum(rows.values())
    kept: list[Lane] = []
    for lane in sorted(choose_lanes(recorded), key=lambda lane: -lane.importance):
        if lane.min_rows <= room and (height >= _MIN_HEIGHT or lane in _LANES):
            kept.append(lane)
            rows[lane.name] = lane.min_rows
            room -= lane.min_rows
    gaps = len(kept) if height >= 28 and room > 2 * len(kept) else 0
    room -= gaps
    tall = 1
    if RIBBONS in rows:
        tall += min(2, room // 12)
        rows[RIBBONS] = tall + max(0, min(ranks - 1, room // 3 if ranks > 4 else room * 3 // 5))
        room -= rows[RIBBONS] - 1
    _grow_lanes(rows, kept, room)
    return _build_boxes(rows, tall, gaps > 0)


def count_ribbons(boxes: Sequence[LaneBox]) -> int:
    """Return the number of ribbons that fit."""
    return next((place.height - place.first_rows + 1 for place in boxes if place.name == RIBBONS), 0)


def _choose_fixed_rows(height: int, ribbons: bool, marks: bool, faults: bool) -> dict[str, int]:
    """Return the rows of the parts that are not value lanes."""
    wanted = (
        *((TIME, 4, True), (RIBBONS, 1, ribbons), (SUMMARY, 7, True), (STEPS, 12, ribbons)),
        *((MARKS, 10, marks), (FAULTS, 10, faults)),
    )
    return {name: 1 for name, min_height, exists in wanted if exists and height >= min_height}


def _grow_lanes(rows: dict[str, int], lanes: Sequence[Lane], room: int) -> None:
    """Give lanes the remaining rows, starting with the lanes furthest below their share; maxima are exceeded last."""
    while room > 0 and lanes:
        wanting = [lane for lane in lanes if rows[lane.name] < lane.max_rows] or lanes
        poorest = min(wanting, key=lambda lane: (rows[lane.name] / lane.weight, -lane.importance))
        rows[poorest.name] += 1
        room -= 1


def _build_boxes(rows: dict[str, int], tall: int, spaced: bool) -> list[LaneBox]:
    order = (MARKS, FAULTS, RIBBONS, *(lane.name for lane in LANES), STEPS, TIME, SUMMARY)
    places: list[LaneBox] = []
    top = 0
    for name in order:
        if name in rows:
            top += 1 if spaced and name in LANES_BY_NAME else 0
            places.append(LaneBox(name, top, rows[name], tall if name == RIBBONS else 1))
            top += rows[name]
    return places
