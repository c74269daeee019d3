"""The timeline's lanes, and how many rows each gets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

MARKS, RIBBONS, STEPS, TIME, SUMMARY = "marks", "ribbons", "steps", "time", "summary"


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane of values, shown if any of them is recorded."""

    name: str
    values: tuple[str, ...]
    min_rows: int
    max_rows: int
    importance: int
    weight: int  # its share of extra rows


# From top to bottom: computation, memory, then what follows from both.
LANES = (
    Lane("utilization", ("utilization",), 1, 6, 9, 3),
    Lane("cores", ("cores", "all_cores", "host_cores"), 1, 6, 8, 3),
    Lane("memory", ("allocated", "reserved", "process", "device"), 2, 8, 7, 3),
    Lane("host memory", ("rss", "all_rss", "host_memory"), 2, 8, 3, 3),
    Lane("pcie", ("sent", "received"), 1, 4, 4, 2),
    Lane("iteration", ("iteration",), 1, 4, 6, 2),
    Lane("power", ("power",), 1, 3, 2, 1),
)
_MIN_POWER_HEIGHT = 22  # below this, power, which follows utilization, gets no row
LANES_BY_NAME = {lane.name: lane for lane in LANES}


@dataclass(frozen=True, slots=True)
class LaneBox:
    """The place of a lane or another part of the picture. ``first_rows``: rows of the first of several ribbons."""

    name: str
    top: int
    height: int
    first_rows: int = 1


def choose_lanes(recorded: Collection[str]) -> list[Lane]:
    """Return the lanes that have data. Host memory gets more important without a GPU."""
    lanes = [lane for lane in LANES if any(value in recorded for value in lane.values)]
    if any(lane.name == "memory" for lane in lanes):
        return lanes
    return [replace(lane, importance=7) if lane.name == "host memory" else lane for lane in lanes]


def layout_lanes(height: int, recorded: Collection[str], ranks: int, *, marks: bool) -> list[LaneBox]:
    """Place all lanes in ``height`` rows. ``ranks``: the largest number of ribbons."""
    rows = _choose_fixed_rows(height, ranks > 0, marks)
    room = height - sum(rows.values())
    kept: list[Lane] = []
    for lane in sorted(choose_lanes(recorded), key=lambda lane: -lane.importance):
        if lane.min_rows <= room and (height >= _MIN_POWER_HEIGHT or lane.name != "power"):
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


def _choose_fixed_rows(height: int, ribbons: bool, marks: bool) -> dict[str, int]:
    """Return the rows of the parts that are not value lanes."""
    wanted = ((TIME, 4, True), (RIBBONS, 1, ribbons), (SUMMARY, 7, True), (STEPS, 12, ribbons), (MARKS, 10, marks))
    return {name: 1 for name, min_height, exists in wanted if exists and height >= min_height}


def _grow_lanes(rows: dict[str, int], lanes: Sequence[Lane], room: int) -> None:
    """Give lanes the remaining rows, starting with the lanes furthest below their share; maxima are exceeded last."""
    while room > 0 and lanes:
        wanting = [lane for lane in lanes if rows[lane.name] < lane.max_rows] or lanes
        poorest = min(wanting, key=lambda lane: (rows[lane.name] / lane.weight, -lane.importance))
        rows[poorest.name] += 1
        room -= 1


def _build_boxes(rows: dict[str, int], tall: int, spaced: bool) -> list[LaneBox]:
    order = (MARKS, RIBBONS, *(lane.name for lane in LANES), STEPS, TIME, SUMMARY)
    places: list[LaneBox] = []
    top = 0
    for name in order:
        if name in rows:
            top += 1 if spaced and name in LANES_BY_NAME else 0
            places.append(LaneBox(name, top, rows[name], tall if name == RIBBONS else 1))
            top += rows[name]
    return places
